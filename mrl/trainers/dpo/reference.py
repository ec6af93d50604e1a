"""Reference of preference learning: its sums of log-probs for the responses of a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mrl.config.resume import contents
from mrl.config.schema import DPOConfig
from mrl.core import Rollout
from mrl.data import PreferenceDataset
from mrl.files import replacing
from mrl.learner import Learner
from mrl.learner.preference import targets
from mrl.trainers.shared.models import build_learner
from mrl.trainers.shared.references import ActorWithoutAdapters, RefreshedReference
from mrl.trainers.shared.run import RunSetup

FILE, HELD_OUT_FILE = "reference_sums.safetensors", "reference_sums_validation.safetensors"
ROWS_AT_ONCE = 512
LiveReference = Learner | RefreshedReference | ActorWithoutAdapters


@dataclass(frozen=True)
class CachedReference:
    """Cached reference. sums [rows, responses of a row] float64, by row number."""

    sums: Tensor

    def of(self, numbers: Sequence[int]) -> Tensor:
        """Returns the sums [B] of the batch of these rows."""
        return self.sums[list(numbers)].flatten()


def cached_references(
    cfg: DPOConfig, start: RunSetup, data: PreferenceDataset, held_out: PreferenceDataset | None
) -> tuple[CachedReference, CachedReference | None]:
    """Returns the sums of all rows, and those of the validation rows. Collective.

    Sums come from files in the run directory if these match tokens, weights, dtype and ld_alpha. Otherwise a temporary
    model computes them, and they are written there.
    """
    model = cache(lambda: build_learner(cfg, start.world, "policy", cfg.ref.path, cfg.actor, trainable=False))
    looked_at = None
    if held_out is not None:
        looked_at = _cached(cfg, start, held_out, held_out.first(cfg.validation.rows), HELD_OUT_FILE, model)
    return _cached(cfg, start, data, range(len(data)), FILE, model), looked_at


def _cached(
    cfg: DPOConfig,
    start: RunSetup,
    data: PreferenceDataset,
    rows: Sequence[int],
    name: str,
    model: Callable[[], Learner],
) -> CachedReference:
    """Returns the sums of these rows of the data; 0 for the others."""
    file, note = start.run_dir / name, start.recorder.note

    def find() -> tuple[str, Tensor | None]:
        key = _key(cfg, data, len(rows))
        found, stored = _read(file)
        is_whole = found is not None and found.shape == (len(data), data.per_row) and found.dtype == torch.float64
        if file.is_file() and not (is_whole and stored == key):
            what = "was computed from other tokens or weights" if is_whole else "is damaged"
            note(f"reference: {file} {what}: computing it again")
        return key, found if is_whole and stored == key else None

    key, sums = start.world.from_main("reading the reference's log-probs", find)
    if sums is not None:
        note(f"reference: using the log-probs of {len(rows)} rows from {file}")
        return CachedReference(sums)
    made = torch.zeros(len(data), data.per_row, dtype=torch.float64)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        numbers = list(rows[first : first + ROWS_AT_ONCE])
        made[numbers] = sums_of(cfg, model(), data.batch(0, numbers)).view(-1, data.per_row)
    start.world.from_main("writing the reference's log-probs", lambda: _write(file, key, made))
    note(f"reference: wrote the log-probs of {len(rows)} rows to {file}; its weights are freed")
    return CachedReference(made)


def live_reference(cfg: DPOConfig, start: RunSetup, actor: Learner) -> LiveReference | None:
    """Returns a model of its own, the delayed actor, or the actor without adapters. Collective.

    Returns None if no loss needs a reference, or if it is cached.
    """
    if not cfg.preference.needs_reference or cfg.ref.policy == "cached":
        return None
    if cfg.ref.policy == "refreshed":
        assert cfg.ref.refresh_every_steps is not None
        return RefreshedReference(actor, cfg.ref.refresh_every_steps, cfg.ref.refresh_share)
    if cfg.ref_is_actor:
        return ActorWithoutAdapters(actor)
    return build_learner(cfg, start.world, "policy", cfg.ref.path, cfg.actor, trainable=False, pixels=actor.pixels)


def sums_of(cfg: DPOConfig, policy: LiveReference, batch: Rollout) -> Tensor:
    """Returns sums [B] float64 of the responses' log-probs, weighted as in the losses. Collective."""
    together = 1 if cfg.preference.is_unpaired else 2
    of = targets(batch, {}, together, cfg.preference.ld_alpha)
    return of.sums(policy.log_probs(batch, 1.0)[0])[0]


def _key(cfg: DPOConfig, data: PreferenceDataset, rows: int) -> str:
    weights = contents(Path(cfg.ref.path or cfg.model.path))
    start = cfg.run.seed if cfg.model.from_scratch and cfg.ref.path is None else None
    made_of = [data.digest(), data.form, rows, weights, start, cfg.model.dtype, cfg.preference.ld_alpha]
    return json.dumps(made_of, sort_keys=True)


def _read(file: Path) -> tuple[Tensor | None, str]:
    """Returns the sums and their key; (None, "") if the file is missing or unreadable."""
    try:
        with safe_open(file, "pt") as stored:
            return stored.get_tensor("sums"), (stored.metadata() or {}).get("key", "")
    except (OSError, SafetensorError):
        return None, ""


def _write(file: Path, key: str, sums: Tensor) -> None:
    with replacing(file) as temporary:
        save_file({"sums": sums}, temporary, {"key": key})
