"""The engine's log-probs against the trainer's, before anything is learnt from the samples.

Far apart they mean that other weights drew the samples than the ones that are trained: an engine that somebody else has
given weights, one whose weights are old, or answers that are made up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algo import rollout_correction
from mrl.config.schema import MismatchConfig
from mrl.core import Rollout

MAX_NAMED = 8


class MismatchError(RuntimeError):
    """Samples are not of the weights that are trained; raised on every rank."""


class MismatchLimits:
    """All ranks see the same log-probs, so each comes to the same verdict by itself.

    note: takes one line for the user
    """

    def __init__(self, cfg: MismatchConfig, note: Callable[[str], None]) -> None:
        self._stop = _Limit("stop", cfg.stop, cfg.stop_sample)
        self._warn = _Limit("warn", cfg.warn, cfg.warn_sample)
        self._note = note

    def check(
        self, rollout: Rollout, log_probs: Tensor, where: Tensor, first: int = 0, version: int | None = None
    ) -> dict[str, float]:
        """Metrics of the trainer's log-probs [R] against the engine's, at the tokens `where` [R] bool. first: the
        number in the step of the rollout's first sample. version: of the trainer's weights, where the samples may be of
        older ones: metrics then split by age too.

        Raises MismatchError if they are further apart than `rollout.mismatch` allows, and notes what it warns of.
        """
        gap = (log_probs - rollout.rollout_log_probs).abs().masked_fill(~where, 0)
        tokens = rollout.dense(where).sum(1)
        by_sample = rollout.dense(gap).sum(1) / tokens.clamp(min=1)
        mean = float(gap.sum() / where.sum().clamp(min=1))
        which = f"step {rollout.step + 1}: engine and trainer disagree on the log-probs of the samples"
        if found := self._stop.beyond(rollout, mean, by_sample, first):
            raise MismatchError(
                f"{which}: {found}. Nothing was learnt from them. Has the engine other weights than the run gave it, "
                "or another model, dtype or temperature? "
                + ("" if version is None else "Do updates move the policy too far while samples are drawn ahead? ")
                + "If they are meant to be that far apart, raise these limits"
            )
        if found := self._warn.beyond(rollout, mean, by_sample, first):
            self._note(f"{which}: {found}")
        metrics = rollout_correction.mismatch(log_probs, rollout.rollout_log_probs, where)
        metrics["max_sample"] = float(by_sample.max())
        ages = {} if version is None else by_age(rollout, gap, where, version)
        return {f"mismatch/{name}": value for name, value in metrics.items()} | ages


def by_age(rollout: Rollout, gap: Tensor, where: Tensor, version: int) -> dict[str, float]:
    """staleness/mean, staleness/max: how many versions of the weights the tokens `where` [R] bool are old;
    mismatch/age_K: mean |gap| [R] of those that are K old. Age 0 is what numerics make of it."""
    assert rollout.weight_versions is not None
    born = rollout.born
    if born is None:
        born = rollout.weight_versions.repeat_interleave(rollout.response_lens)
    ages = version - born[where]
    if not ages.numel():
        return {}
    means = {f"mismatch/age_{int(age)}": float(gap[where][ages == age].mean()) for age in ages.unique()}
    return {"staleness/mean": float(ages.float().mean()), "staleness/max": float(ages.max())} | means


@dataclass(frozen=True)
class _Limit:
    """Nats a token, in the mean of a step's tokens and of one sample's."""

    key: str
    step: float | None
    sample: float | None

    def beyond(self, rollout: Rollout, mean: float, by_sample: Tensor, first: int) -> str:
        """What is, in words; empty if nothing is."""
        found = []
        if self.step is not None and mean > self.step:
            found.append(f"{mean:.2g} nats a token in the mean (rollout.mismatch.{self.key} = {self.step:g})")
        if self.sample is not None and bool((by_sample > self.sample).any()):
            names = _named(rollout, by_sample, self.sample, first)
            found.append(f"{names} (rollout.mismatch.{self.key}_sample = {self.sample:g})")
        return "; ".join(found)


def _named(rollout: Rollout, by_sample: Tensor, limit: float, first: int) -> str:
    beyond = torch.nonzero(by_sample > limit).flatten()
    worst = beyond[by_sample[beyond].argsort(descending=True)][:MAX_NAMED].tolist()
    rows = rollout.rows.tolist() if rollout.rows is not None else None
    names = [
        f"sample {first + sample}{f' (data row {rows[sample]})' if rows else ''} {float(by_sample[sample]):.2g}"
        for sample in worst
    ]
    more = f" and {len(beyond) - MAX_NAMED} more" if len(beyond) > MAX_NAMED else ""
    return f"{', '.join(names)}{more} nats a token"
