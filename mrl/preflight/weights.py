"""Checks that weight files match their config.json; reads headers, not weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mrl.config.model_dirs import is_converted
from mrl.config.schema import Config
from mrl.families import ModelArch, is_reward_model, load_arch
from mrl.families.table import HF_VALUE_HEAD, Role, weight_table
from mrl.preflight.finding import Finding
from mrl.weights.disk.hf_rows import hf_rows
from mrl.weights.disk.safetensors_io import HFCheckpoint
from mrl.weights.disk.unused import unused_tensors
from mrl.weights.errors import WeightError

MAX_SHOWN = 10


def check_weights(cfg: Config) -> Iterator[Finding]:
    """Checks every model that starts from a directory: its tensors exist with the shapes of config.json, without
    others; an output layer beside tied embeddings equals them."""
    for key, path, role in _models(cfg):
        if is_converted(path):
            yield Finding("weights", "ok", f"{key}: {path} is a converted model and complete by its manifest")
            continue
        if not any(Path(path).glob("*.safetensors")):
            yield Finding("weights", "skipped", f"{key}: {path} has pickled weights: only the run itself reads them")
            continue
        arch, found = load_arch(path), []
        try:
            with HFCheckpoint(path) as checkpoint:
                found = list(_misfits(checkpoint, arch, role, path))
        except (WeightError, OSError) as error:
            found = [str(error)]
        for text in found[:MAX_SHOWN]:
            yield Finding("weights", "problem", f"{key}: {text}")
        if len(found) > MAX_SHOWN:
            text = f"{len(found) - MAX_SHOWN} more tensors of {path} do not match its config.json"
            yield Finding("weights", "problem", f"{key}: {text}")
        if not found:
            head = " (the value head may start at 0)" if role == "critic" else ""
            text = f"{key}, as {role}: {path} has every tensor that its config.json ({arch.family}) describes{head}"
            yield Finding("weights", "ok", text)


def _models(cfg: Config) -> Iterator[tuple[str, str, Role]]:
    """Yields (key, directory, role), each directory once a use."""
    seen = set()
    for name, use in cfg.models().items():
        if use.path is None and cfg.model.from_scratch:
            continue
        role: Role = "critic" if use.has_head or use.scores else "policy"
        path = use.path or cfg.model.path
        if (path, role) not in seen:
            seen.add((path, role))
            yield ("model.path" if use.path is None else f"{name}.path"), path, role


def _misfits(checkpoint: HFCheckpoint, arch: ModelArch, role: Role, path: str) -> Iterator[str]:
    table = weight_table(arch, role)
    for row in table.values():
        for i in range(len(row.hf)):
            if row.optional and row.hf[i] not in checkpoint:
                continue
            try:
                hf_rows(checkpoint, row, i, allow_pickle=False)
            except WeightError as error:
                yield str(error)
    if role == "critic" and is_reward_model(path) and HF_VALUE_HEAD not in checkpoint:
        yield f"{path}/config.json names a reward model, but the weights have no {HF_VALUE_HEAD} to start from"
    yield from unused_tensors(checkpoint, arch, table, role)
