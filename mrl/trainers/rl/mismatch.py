"""The engine's log-probs against the trainer's, before anything is learnt from the samples.

Far apart they mean that other weights drew the samples than the ones that are trained: an engine that somebody else has
given weights, one whose weights are old, or answers that are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrl.algo import rollout_correction
from mrl.config.schema import MismatchConfig
from mrl.core import Rollout

MAX_NAMED = 8


class MismatchError(RuntimeError):
    """Samples are not of the weights that are trained; raised on every rank."""


class MismatchLimits:
    """Limits of the train / rollout mismatch. All ranks see the same log-probs, so each decides alike by itself.

    note: takes one line for the user
    exact: engines and trainer compute alike, so that under the same weights the order of sums is all that differs
    first_version: up to it the weights are those that the run began with
    """

    def __init__(
        self, cfg: MismatchConfig, note: Callable[[str], None], exact: bool = False, first_version: int = 0
    ) -> None:
        self._stop = _Limit("stop", cfg.stop, cfg.stop_sample)
        self._warn = _Limit("warn", cfg.warn, cfg.warn_sample)
        self._exact = _Limit("exact", *((cfg.exact, cfg.exact_sample) if exact else (None, None)))
        self._note, self._first_version = note, first_version

    def check(
        self,
        rollout: Rollout,
        log_probs: Tensor,
        where: Tensor,
        sample_ids: Sequence[int] | None = None,
        version: int | None = None,
        *,
        same: bool = True,
    ) -> dict[str, float]:
        """Metrics of the trainer's log-probs [R] against the engine's, at the tokens `where` [R] bool.
        sample_ids: the numbers in the step of the rollout's samples; None: 0, 1, ... version: of the trainer's weights,
        where the samples may be of older ones: metrics then split by age too. same: the log-probs are of that version
        itself, without dropout.

        Raises MismatchError if they are further apart than `rollout.mismatch` allows, and notes what it warns of.
        Nothing is said of no tokens, such as those of a mini-batch of earlier steps' samples alone.
        """
        if not bool(where.any()):
            return {}
        gap = (log_probs - rollout.rollout_log_probs).abs().masked_fill(~where, 0)
        gaps = _Gaps(rollout, gap, where, range(rollout.num_samples) if sample_ids is None else sample_ids)
        ages = None if version is None else self._ages(rollout, version)
        if same:
            self._check_exact(gaps, where if ages is None else where & (ages == 0))
        which = f"step {rollout.step + 1}: engine and trainer disagree on the log-probs of the samples"
        if found := self._stop.beyond(gaps):
            raise MismatchError(
                f"{which}: {found}. Nothing was learnt from them. Has the engine other weights than the run gave it, "
                "or another model, dtype or temperature? "
                + ("" if version is None else "Do updates move the policy too far while samples are drawn ahead? ")
                + "If they are meant to be that far apart, raise these limits"
            )
        if found := self._warn.beyond(gaps):
            age = 0 if ages is None else int(ages[where].max())
            old = f", of weights up to {age} weight sync{'s' * (age > 1)} old (rollout.max_staleness)" if age else ""
            self._note(f"{which}{old}: {found}")
        metrics = rollout_correction.mismatch(log_probs, rollout.rollout_log_probs, where)
        metrics["max_sample"] = float(gaps.by_sample.max())
        by_ages = {} if ages is None else by_age(ages[where], gap[where])
        return {f"mismatch/{name}": value for name, value in metrics.items()} | by_ages

    def _ages(self, rollout: Rollout, version: int) -> Tensor:
        """[R]: how many weight syncs are between the weights that drew a token and those of `version`."""
        return max(version, self._first_version) - born(rollout).clamp(min=self._first_version)

    def _check_exact(self, all_gaps: _Gaps, where: Tensor) -> None:
        """where [R] bool: tokens that the weights have drawn of which the trainer's log-probs are."""
        rollout, gaps = all_gaps.rollout, replace(all_gaps, where=where)
        if not (found := self._exact.beyond(gaps)):
            return
        worst = gaps.named(int(gaps.by_sample.argmax()))
        at = 0 if rollout.weight_versions is None else int(born(rollout)[where].max())
        synced = f"the weights of step {at}" if at else "the weights that the run began with"
        raise MismatchError(
            f"step {rollout.step + 1}: engine and trainer compute in float32, and disagree on the log-probs of the "
            f"{int(where.sum())} tokens that the engine generated with {synced}: {found}; furthest {worst}. Nothing "
            "was learnt from them. Either the engine has not taken all of the last sync (sync.verify: checksum names "
            "the tensor; SGLang keeps an old one of which it gets half), or somebody else changes it; or it reads "
            "config.json otherwise (rotary keys, windows, scales), which rollout.engine: transformers does not. If "
            "they are meant to be that far apart, raise these limits"
        )


@dataclass(frozen=True)
class _Gaps:
    """|trainer - engine| `gap` [R] of the tokens `where` [R] bool; sample_ids: the numbers of the rollout's samples."""

    rollout: Rollout
    gap: Tensor
    where: Tensor
    sample_ids: Sequence[int]

    @property
    def mean(self) -> float:
        return float(self.gap[self.where].sum() / self.where.sum().clamp(min=1))

    @property
    def by_sample(self) -> Tensor:
        """[B]: the mean of each sample's tokens."""
        dense = self.rollout.dense
        return dense(self.gap.masked_fill(~self.where, 0)).sum(1) / dense(self.where).sum(1).clamp(min=1)

    def named(self, sample: int) -> str:
        rows = self.rollout.rows
        row = "" if rows is None else f" (data row {int(rows[sample])})"
        return f"sample {self.sample_ids[sample]}{row} {float(self.by_sample[sample]):.2g}"


def born(rollout: Rollout) -> Tensor:
    """[R]: the version of the weights that drew each token."""
    assert rollout.weight_versions is not None
    own = rollout.weight_versions.repeat_interleave(rollout.response_lens)
    return own if rollout.token_weight_versions is None else rollout.token_weight_versions


def by_age(ages: Tensor, gaps: Tensor) -> dict[str, float]:
    """Returns metrics of the ages of n tokens, in weight syncs, and of their log-prob gaps. staleness/mean,
    staleness/max: of the ages; mismatch/age_K: the mean gap of tokens of age K. Age 0 shows numerics alone."""
    if not ages.numel():
        return {}
    means = {f"mismatch/age_{int(age)}": float(gaps[ages == age].mean()) for age in ages.unique()}
    return {"staleness/mean": float(ages.float().mean()), "staleness/max": float(ages.max())} | means


@dataclass(frozen=True)
class _Limit:
    """Nats a token, in the mean of a step's tokens and of one sample's."""

    key: str
    step: float | None
    sample: float | None

    def beyond(self, gaps: _Gaps) -> str:
        """Returns which limits are exceeded, in words; empty if none."""
        found = []
        if self.step is not None and (mean := gaps.mean) > self.step:
            found.append(f"{mean:.2g} nats a token in the mean (rollout.mismatch.{self.key} = {self.step:g})")
        if self.sample is not None and bool((gaps.by_sample > self.sample).any()):
            names = _named(gaps, self.sample)
            found.append(f"{names} (rollout.mismatch.{self.key}_sample = {self.sample:g})")
        return "; ".join(found)


def _named(gaps: _Gaps, limit: float) -> str:
    by_sample = gaps.by_sample
    beyond = torch.nonzero(by_sample > limit).flatten()
    worst = beyond[by_sample[beyond].argsort(descending=True)][:MAX_NAMED].tolist()
    more = f" and {len(beyond) - MAX_NAMED} more" if len(beyond) > MAX_NAMED else ""
    return f"{', '.join(map(gaps.named, worst))}{more} nats a token"
