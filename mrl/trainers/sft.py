"""Supervised fine-tuning through the same learner: packed rows, loss over the tokens that are learnt."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from mrl import failure
from mrl.config.schema import SFTConfig
from mrl.core import Rollout, StepStats
from mrl.data import SFTDataset
from mrl.data.open_data import open_sft
from mrl.data.packed_rows import PackedRows
from mrl.data.wrapped_rows import WrappedRows
from mrl.learner import Loss, losses
from mrl.learner.likelihood import likelihood
from mrl.learner.likelihood import metrics as of_held_out
from mrl.trainers.shared.best_validation import BestValidation
from mrl.trainers.shared.held_out import ValidatedLoop, ValidatedRun
from mrl.trainers.shared.lm_head_quantization_error import lm_head_quantization_error
from mrl.trainers.shared.models import build_learner
from mrl.trainers.shared.run import set_up_run
from mrl.trainers.shared.updates import named, require_gradient

ROWS_AT_ONCE = 512  # of a validation


@dataclass
class SFTRun(ValidatedRun):
    cfg: SFTConfig
    data: SFTDataset
    packed: PackedRows | WrappedRows | None
    held_out: SFTDataset | None

    def batch(self, step: int) -> Rollout:
        """The rows of step `step`, from 0."""
        rows = self.cfg.batch.samples_per_step
        if self.packed is not None:
            return self.packed.batch(step, rows)
        return self.data.batch(step, self.data.of_step(step, rows, self.cfg.run.seed))

    def validate(self) -> dict[str, float]:
        assert self.held_out is not None
        numbers = self.held_out.first(self.cfg.validation.rows)
        return of_held_out(likelihood(self.actor, self.held_out.batches(numbers, ROWS_AT_ONCE)), "validation")


class SFTLoop(ValidatedLoop[SFTRun]):
    def open(self) -> contextlib.AbstractContextManager[SFTRun]:
        return open_sft_run(self.cfg)

    def step(self, step: int) -> StepStats:
        return train_step(self.run, step)


def train_step(run: SFTRun, step: int) -> StepStats:
    stats, began, cfg = run.checkpointer.new_stats(step + 1), time.monotonic(), run.cfg
    batch = run.batch(step)
    samples = range(batch.num_samples)
    with run.phase("update", stats):
        metrics = lm_head_quantization_error(run.actor, batch, temperature=1.0)
        metrics |= run.actor.backward(batch, samples, step_loss(cfg, batch), temperature=1.0)
        metrics |= run.actor.step()
        require_gradient(run.actor, metrics)
        run.updates.note("actor", run.actor, batch, samples, metrics)
        run.updates.end_of_step(step + 1)
    stats.metrics |= named("actor", metrics)
    stats.metrics |= run.speed.metrics(stats, batch, batch.tokens.numel(), time.monotonic() - began)
    run.after_update(stats)
    run.phase.end_of_step(stats)
    run.recorder.log(stats)
    return stats


def step_loss(cfg: SFTConfig, batch: Rollout) -> Loss:
    """Over the counted tokens of the whole step; its noise depends on seed and step alone."""
    noise = cfg.loss.neftune_noise_alpha or 0.0
    seed = (cfg.run.seed << 32) + batch.step
    if cfg.loss.type == "dft":
        return losses.dft(batch.normalized_loss_weights, noise, seed)
    if cfg.loss.label_smoothing:
        return losses.smoothed_cross_entropy(batch.normalized_loss_weights, cfg.loss.label_smoothing, noise, seed)
    return losses.cross_entropy(batch.normalized_loss_weights, noise, seed)


@contextlib.contextmanager
def open_sft_run(cfg: SFTConfig) -> Iterator[SFTRun]:
    """Builds the run on every rank; closes files and process group on any exit."""
    with failure.noted():
        rows, cfg = open_sft(cfg)
    with set_up_run(cfg) as start:
        actor = build_learner(cfg, start.world, "policy", None, cfg.actor)
        best = BestValidation.of(cfg)
        for line in rows.notes():
            start.recorder.note(line)
        begun = start.begin(actor, best=best, end_tokens={"actor": rows.train.end_tokens})
        run = SFTRun(**vars(begun), best=best, data=rows.train, packed=rows.packed, held_out=rows.held_out)
        run.resume()
        start.is_set_up()
        yield run
