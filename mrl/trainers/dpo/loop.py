"""Preference learning: log-probs of whole responses, against those of a reference, in one of many losses."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrl.algo import preference_unpaired
from mrl.algo.preference import LogProbSums
from mrl.config.schema import DPOConfig
from mrl.core import Rollout, StepStats
from mrl.data import PreferenceDataset
from mrl.data.preference import mismatched_pairs, with_prompts
from mrl.learner.preference import PreferenceTargets, one_pass, targets, two_pass
from mrl.options.preference import BCO
from mrl.trainers.dpo import metrics as reported
from mrl.trainers.dpo.reference import CachedReference, LiveReference, cached_references, live_reference, sums_of
from mrl.trainers.shared.best_validation import BestValidation
from mrl.trainers.shared.held_out import ValidatedLoop, ValidatedRun
from mrl.trainers.shared.lm_head_quantization_error import lm_head_quantization_error
from mrl.trainers.shared.models import build_learner
from mrl.trainers.shared.preferences import pictures_of, read_preferences
from mrl.trainers.shared.references import RefreshedReference
from mrl.trainers.shared.run import set_up_run
from mrl.trainers.shared.updates import named, require_gradient

MOST_GAP = 0.1  # nats a token: bound on rounding between two computations of one model


class RewardShift:
    """Moving average that is BCO's reward threshold; part of the run's state."""

    def __init__(self) -> None:
        self.value: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]

    def after(self, found: float | None, decay: float) -> float:
        """Returns the average after a step's value, if that is finite; 0 before the first value."""
        if found is not None and math.isfinite(found):
            self.value = found if self.value is None else decay * self.value + (1 - decay) * found
        return self.value or 0.0


@dataclass
class DPORun(ValidatedRun):
    """Run of preference learning. reference: of `data`; held_out_reference: of `held_out`."""

    cfg: DPOConfig
    data: PreferenceDataset
    held_out: PreferenceDataset | None
    reference: LiveReference | CachedReference | None
    held_out_reference: LiveReference | CachedReference | None
    shift: RewardShift

    def validate(self) -> dict[str, float]:
        assert self.held_out is not None
        return {f"validation/{name}": value for name, value in of_held_out(self, self.held_out).items()}


class DPOLoop(ValidatedLoop[DPORun]):
    def open(self) -> contextlib.AbstractContextManager[DPORun]:
        return open_run(self.cfg)

    def step(self, step: int) -> StepStats:
        return train_step(self.run, step)


def train_step(run: DPORun, step: int) -> StepStats:
    stats, began = run.checkpointer.new_stats(step + 1), time.monotonic()
    numbers = run.data.of_step(step, run.cfg.batch.rows_per_step, run.cfg.run.seed)
    batch = run.data.batch(step, numbers)
    with run.phase("update", stats):
        of_step = step_targets(run, batch, numbers, run.reference)
        batch = with_prompts(batch) if run.cfg.preference.learns_prompts else batch
        error = lm_head_quantization_error(run.actor, batch, temperature=1.0)
        of_step, policy, metrics = update(run, batch, of_step)
        held_against = [of_step.reference[of_step.member]]
        require_gradient(run.actor, metrics)
        run.updates.note("actor", run.actor, batch, range(batch.num_samples), metrics, held_against)
        run.updates.end_of_step(step + 1)
        if isinstance(run.reference, RefreshedReference):
            run.reference.after_step(step + 1)
    metrics |= error | reported.of_step(of_step, policy, [run.data.rows[number] for number in numbers])
    if step == 0 and run.cfg.preference.needs_reference:
        metrics |= first_gap(run, policy[0] - of_step.reference, of_step.tokens)
    stats.metrics |= named("actor", metrics)
    stats.metrics |= run.speed.metrics(stats, batch, batch.tokens.numel(), time.monotonic() - began)
    run.after_update(stats)
    run.phase.end_of_step(stats)
    run.recorder.log(stats)
    return stats


def first_gap(run: DPORun, ratios: Tensor, tokens: Tensor) -> dict[str, float]:
    """Returns dpo/first_gap, the largest log-ratio of policy and reference before the first update.

    Notes a gap if policy and reference start from one model. ratios, tokens [B]: of the responses.
    """
    if run.cfg.ref.path is None and float((ratios / tokens).abs().max()) > MOST_GAP:
        run.recorder.note(
            f"policy and reference differ by more than {MOST_GAP:g} nats per token before the first update, although "
            "they start from the same weights: see dpo/first_gap"
        )
    return {"dpo/first_gap": float(ratios.abs().max())}


def of_held_out(run: DPORun, data: PreferenceDataset) -> dict[str, float]:
    """Returns losses and rewards of the first `validation.rows` rows as one batch, with BCO's threshold of the last
    step. Collective."""
    numbers = data.first(run.cfg.validation.rows)
    batch = data.batch(0, numbers)
    held = step_targets(run, batch, numbers, run.held_out_reference)
    held, policy = first_pass(run, with_prompts(batch) if run.cfg.preference.learns_prompts else batch, held)
    found = reported.of_step(held, policy, [data.rows[number] for number in numbers])
    return {"loss": float(held.value(policy)), **found}


def step_targets(
    run: DPORun, batch: Rollout, numbers: Sequence[int], reference: LiveReference | CachedReference | None
) -> PreferenceTargets:
    """Returns the loss targets of these rows: the reference's sums and KTO's baseline. Collective."""
    cfg = run.cfg.preference
    of_step = targets(batch, cfg.loss.chosen, run.data.per_row, cfg.ld_alpha, cfg.learns_prompts)
    of_step = replace(of_step, shift=run.shift.value or 0.0)
    if isinstance(reference, CachedReference):
        return replace(of_step, reference=reference.of(numbers))
    if reference is not None:
        of_step = replace(of_step, reference=sums_of(run.cfg, reference, batch))
    if cfg.needs_kl:
        others = mismatched_pairs(batch, run.cfg.data.max_tokens)
        ratios = sums_of(run.cfg, run.actor, others)
        ratios = ratios - sums_of(run.cfg, reference, others) if reference is not None else ratios
        of_step = replace(of_step, kl=preference_unpaired.kl_estimate(ratios))
    return of_step


def update(
    run: DPORun, batch: Rollout, of_step: PreferenceTargets
) -> tuple[PreferenceTargets, Tensor, dict[str, float]]:
    """Makes one optimizer update: (loss targets, the policy's sums [2, B] before it, metrics). Collective.

    It takes one pass if a row's gradient is independent of other rows and every pair fits into a micro-batch, else two.
    """
    actor, samples = run.actor, range(batch.num_samples)
    fits = of_step.together == 1 or actor.planner.fits(batch, of_step.together)
    if fits and not run.cfg.preference.couples_rows:
        loss = one_pass(of_step, actor.total_over_context, actor.mesh.cp)
        metrics = actor.backward(batch, samples, loss, temperature=1.0)
        policy = of_step.sums(actor.last_outputs.log_probs(batch)[0])
    else:
        of_step, policy = first_pass(run, batch, of_step)
        of_step = with_shift(run, of_step, policy)
        loss, value = two_pass(of_step, policy)
        metrics = actor.backward(batch, samples, loss, temperature=1.0) | {"loss": value}
    return of_step, policy, metrics | actor.step()


def first_pass(run: DPORun, batch: Rollout, of_step: PreferenceTargets) -> tuple[PreferenceTargets, Tensor]:
    """Returns the targets with the rows' weights, and the policy's sums [2, B]. Collective."""
    if run.cfg.preference.use_weighting:
        log_probs, _, squares = run.actor.distribution(batch, 1.0)
        likely = of_step.member.new_zeros(batch.num_samples, dtype=torch.float64)
        each = (log_probs.double() - squares.double().log()) * (of_step.mean_weights > 0)
        likely = likely.index_add(0, of_step.member, each) / of_step.tokens
        return replace(of_step, row_weights=likely.view(-1, 2).sum(1).exp()), of_step.sums(log_probs)
    return of_step, of_step.sums(run.actor.log_probs(batch, 1.0)[0])


def with_shift(run: DPORun, of_step: PreferenceTargets, policy: Tensor) -> PreferenceTargets:
    """Updates BCO's threshold. policy [2, B]: sums"""
    if isinstance(bco := of_step.losses.get("bco"), BCO):
        responses = LogProbSums(policy[0], of_step.reference, of_step.tokens)
        found = preference_unpaired.mean_reward(responses, of_step.labels, bco.beta)
        of_step = replace(of_step, shift=run.shift.after(found, bco.shift_decay))
    return of_step


@contextlib.contextmanager
def open_run(cfg: DPOConfig) -> Iterator[DPORun]:
    """Builds the run on every rank; closes files and process group on any exit."""
    with set_up_run(cfg) as start:
        data, held_out = read_preferences(cfg, start.recorder)
        for line in balance_notes(cfg, data):
            start.recorder.note(line)
        caches = cfg.preference.needs_reference and cfg.ref.policy == "cached"
        cached, held = cached_references(cfg, start, data, held_out) if caches else (None, None)
        pixels = pictures_of(data, held_out)
        actor = build_learner(cfg, start.world, "policy", None, cfg.actor, pixels=pixels)
        live, shift = live_reference(cfg, start, actor), RewardShift()
        parts = {"actor": actor} | ({"ref": live} if isinstance(live, RefreshedReference) else {})
        best = BestValidation.of(cfg)
        begun = start.begin(
            actor, parts=parts, states={"shift": shift}, best=best, end_tokens={"actor": data.end_tokens}
        )
        begun.speed.watch(live)
        run = DPORun(
            **vars(begun),
            best=best,
            data=data,
            held_out=held_out,
            reference=cached or live,
            held_out_reference=held or live,
            shift=shift,
        )
        run.resume()
        start.is_set_up()
        yield run


def balance_notes(cfg: DPOConfig, data: PreferenceDataset) -> Iterator[str]:
    """Warns if KTO's weighted counts leave the paper's advice: desirable rows 1 to 4/3 times the undesirable ones."""
    kto = cfg.preference.loss.kto
    if kto is None:
        return
    good = sum(bool(row.scores[0]) for row in data.rows)
    weighed = good * kto.desirable_weight, (len(data) - good) * kto.undesirable_weight
    if not weighed[1] <= weighed[0] <= 4 / 3 * weighed[1]:
        yield (
            f"kto: {good} desirable and {len(data) - good} undesirable rows have total weights {weighed[0]:g} and "
            f"{weighed[1]:g}: set preference.loss.kto.desirable_weight and undesirable_weight so that their ratio is "
            "between 1 and 4/3"
        )
