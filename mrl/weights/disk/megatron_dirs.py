"""Megatron checkpoint directories: a converted model, a run's checkpoint, or a bare torch_dist directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mrl.config.model_dirs import FORMAT, RELEASE, TRACKER, read_converted
from mrl.directories import MANIFEST, read_manifest
from mrl.families import ModelArch, load_arch
from mrl.families.table import Role
from mrl.files import lock_for_reading
from mrl.foreign import read_json
from mrl.weights.disk.model_files import role_of
from mrl.weights.disk.stored_names import StoredNames
from mrl.weights.disk.torch_dist_files import METADATA
from mrl.weights.errors import WeightError

RUN_STATE, RUN_CONFIG = "state.json", "config.yaml"
UNNAMED = StoredNames({}, ())
_ADAPTERS_ALONE = "only adapters: run `mrl convert megatron-to-hf --adapter`, then `mrl merge`"


@dataclass(frozen=True)
class MegatronModel:
    """A Megatron checkpoint on disk.

    weights: a torch_dist directory. model_files: a directory with its config.json and tokenizer.
    names: names of the checkpoint's tensors; without keys if the checkpoint does not record them.
    drafts: directory of its multi-token prediction layers; None for a run that started from random weights
    adapters: description of the adapters, for a run's checkpoint that holds adapters in place of weights
    """

    weights: Path
    model_files: Path
    role: Role
    arch: ModelArch
    names: StoredNames
    drafts: Path | None
    adapters: dict[str, Any] | None = None


@contextlib.contextmanager
def open_megatron(
    path: Path,
    part: str | None = None,
    model_files: Path | None = None,
    role: Role | None = None,
    *,
    adapters: bool = False,
) -> Iterator[MegatronModel]:
    """Opens the model at `path`, and keeps a run from removing its checkpoint meanwhile.

    part: model of a run's checkpoint, by default "actor"; model_files: directory of the model's config.json and
    tokenizer, if `path` does not name it; role: if neither names it; adapters: expect adapters, not weights.
    Raises WeightError for a checkpoint that is incomplete, damaged, contradictory or not Megatron's.
    """
    with contextlib.ExitStack() as stack:
        try:
            marker = path / MANIFEST
            if marker.is_file():
                lock_for_reading(stack.enter_context(marker.open("rb")))
            found = _find(path, part, model_files, role)
            if adapters != (found.adapters is not None):
                there = "no adapters: leave --adapter out" if adapters else _ADAPTERS_ALONE
                raise WeightError(f"{path} has {there}")
            yield found
        except ValueError as error:
            raise WeightError(str(error)) from error


def _find(path: Path, part: str | None, model_files: Path | None, role: Role | None) -> MegatronModel:
    if (path / RUN_STATE).is_file():
        return _with_role(path, _of_run(path, part or "actor", model_files), role)
    if part is not None:
        raise WeightError(f"{path} is not a run's checkpoint (step_N) and has only one model: leave --model {part} out")
    if (path / RELEASE).is_dir() and _is_ours(path):
        if model_files is not None:
            raise WeightError(f"{path} has its own config.json and tokenizer: leave --model-files out")
        return _with_role(path, converted(path), role)
    weights = path if (path / METADATA).is_file() else _tracked(path)
    if model_files is None:
        raise WeightError(f"{path} has no config.json: name the model's directory with --model-files")
    role = role or role_of(model_files)
    return MegatronModel(weights, model_files, role, load_arch(model_files), UNNAMED, model_files)


def _with_role(path: Path, model: MegatronModel, role: Role | None) -> MegatronModel:
    """Returns a model whose checkpoint records its role. Raises WeightError for another `role`."""
    if role not in (None, model.role):
        raise WeightError(f"{path} is recorded as a {model.role}, and not as a {role}: leave --role out")
    return model


def converted(path: Path) -> MegatronModel:
    """Returns a converted model. Raises ValueError if the directory is not complete."""
    manifest = read_converted(path)
    names = StoredNames(manifest["keys"], ())
    return MegatronModel(path / RELEASE, path, manifest["role"], load_arch(path), names, path)


def _is_ours(path: Path) -> bool:
    """Returns True for mrl's format, also if the directory is incomplete, which `converted` reports."""
    return not (path / MANIFEST).is_file() or read_manifest(path).get("format") == FORMAT


def _of_run(path: Path, part: str, model_files: Path | None) -> MegatronModel:
    learners = read_manifest(path).get("learners", {})
    if not isinstance(learners, dict) or not all(isinstance(one, dict) and "role" in one for one in learners.values()):
        raise WeightError(f"{path / MANIFEST} does not list the checkpoint's models")
    if part not in learners:
        raise WeightError(f"{path} has no {part}, only {', '.join(learners) or 'nothing'}")
    files = model_files or _model_of_run(path.parent.parent / RUN_CONFIG, part)
    if not (files / "config.json").is_file():
        raise WeightError(f"{files} has no config.json: name the model's directory with --model-files")
    kind, arch = learners[part], load_arch(files)
    if kind["role"] == "critic" and isinstance(record := kind.get("arch"), dict):
        arch = arch.with_head_of(record)
    model = (read_json(path / RUN_STATE).get("config") or {}).get("model") or {}
    drafts = None if model.get("from_scratch") else files
    return MegatronModel(path / part, files, kind["role"], arch, UNNAMED, drafts, kind.get("adapters"))


def _model_of_run(config: Path, part: str) -> Path:
    if not config.is_file():
        raise WeightError(f"{config}, which names the model, is missing: name its directory with --model-files")
    try:
        content: dict[str, Any] = yaml.safe_load(config.read_text())
        own = (content.get("critic") or {}).get("path") if part == "critic" else None
        return Path(own or content["model"]["path"])
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise WeightError(f"{config} does not name the model ({' '.join(str(error).split())})") from error


def _tracked(path: Path) -> Path:
    """Returns the weights in Megatron-LM's layout: a file with the iteration, and a directory for it."""
    tracker = path / TRACKER
    if not tracker.is_file():
        raise WeightError(f"{path} is not a Megatron checkpoint: neither {METADATA} nor {TRACKER} nor {RUN_STATE}")
    iteration = tracker.read_text().strip()
    if iteration != RELEASE and not (iteration.isdecimal() and len(iteration) < 10):
        raise WeightError(f"{tracker} contains {iteration[:40]!r} instead of an iteration number")
    return path / (RELEASE if iteration == RELEASE else f"iter_{int(iteration):07d}")
