"""Reward model training: the policy's body with a score head, trained on preference data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mrl.config.schema import RewardModelTrainerConfig
from mrl.core import StepStats
from mrl.data import PreferenceDataset
from mrl.families.table import VALUE_HEAD
from mrl.learner import Learner
from mrl.learner.reward import one_pass, two_pass
from mrl.models.initialise import draw_head
from mrl.trainers.reward_model import metrics as reported
from mrl.trainers.reward_model.batches import ScoreBatch, score_batch
from mrl.trainers.shared.best_validation import BestValidation
from mrl.trainers.shared.held_out import ValidatedLoop, ValidatedRun
from mrl.trainers.shared.models import build_learner
from mrl.trainers.shared.preferences import pictures_of, read_preferences
from mrl.trainers.shared.run import set_up_run
from mrl.trainers.shared.updates import named


@dataclass
class RewardModelRun(ValidatedRun):
    cfg: RewardModelTrainerConfig
    data: PreferenceDataset
    held_out: PreferenceDataset | None

    def validate(self) -> dict[str, float]:
        assert self.held_out is not None
        return {f"validation/{name}": value for name, value in of_held_out(self.cfg, self.actor, self.held_out).items()}


class RewardModelLoop(ValidatedLoop[RewardModelRun]):
    def open(self) -> contextlib.AbstractContextManager[RewardModelRun]:
        return open_run(self.cfg)

    def step(self, step: int) -> StepStats:
        return train_step(self.run, step)


def train_step(run: RewardModelRun, step: int) -> StepStats:
    stats, began = run.checkpointer.new_stats(step + 1), time.monotonic()
    numbers = run.data.of_step(step, run.cfg.batch.rows_per_step, run.cfg.run.seed)
    batch = score_batch(run.cfg, run.data, step, numbers)
    with run.phase("update", stats):
        metrics, scores = update(run.actor, batch)
        metrics |= run.actor.step()
        run.updates.note("actor", run.actor, batch.inputs, range(batch.inputs.num_samples), metrics)
        run.updates.end_of_step(step + 1)
    metrics |= reported.of_rows(batch.targets, scores, batch.lengths, batch.sources)
    stats.metrics |= named("actor", metrics)
    stats.metrics |= run.speed.metrics(stats, batch.texts, batch.texts.tokens.numel(), time.monotonic() - began)
    run.after_update(stats)
    run.phase.end_of_step(stats)
    run.recorder.log(stats)
    return stats


def update(actor: Learner, batch: ScoreBatch) -> tuple[dict[str, float], Tensor]:
    """Computes gradients of one optimizer step: (metrics, the scores [heads, S] float64 before it). Collective.

    It takes one pass if all texts of a row fit into a micro-batch together, else two.
    """
    t, inputs = batch.targets, batch.inputs
    samples = range(inputs.num_samples)
    if t.together == 1 or actor.planner.fits(inputs, t.together):
        metrics = actor.backward(inputs, samples, one_pass(t, actor.total_over_context, actor.mesh.cp), temperature=1.0)
        return metrics, actor.last_outputs.outputs(inputs, actor.arch.score_heads)[:-1, t.places].double()
    scores = actor.scores(inputs)[:, t.places].double()
    loss, value = two_pass(t, scores)
    return actor.backward(inputs, samples, loss, temperature=1.0) | {"loss": value}, scores


def of_held_out(cfg: RewardModelTrainerConfig, actor: Learner, data: PreferenceDataset) -> dict[str, float]:
    """Returns the loss and the score metrics of the first `validation.rows` rows. Collective."""
    batch = score_batch(cfg, data, 0, data.first(cfg.validation.rows))
    scores = actor.scores(batch.inputs)[:, batch.targets.places].double()
    found = reported.of_rows(batch.targets, scores, batch.lengths, batch.sources)
    return {"loss": float(batch.targets.value(scores)), **found}


@contextlib.contextmanager
def open_run(cfg: RewardModelTrainerConfig) -> Iterator[RewardModelRun]:
    """Builds the run on every rank; closes files and process group on any exit."""
    with set_up_run(cfg) as start:
        data, held_out = read_preferences(cfg, start.recorder)
        arch = cfg.trained_arch()
        pixels = pictures_of(data, held_out)
        actor = build_learner(cfg, start.world, "critic", None, cfg.actor, arch=arch, pixels=pixels)
        start_head(cfg, actor)
        best = BestValidation.of(cfg)
        run = RewardModelRun(**vars(start.begin(actor, best=best)), best=best, data=data, held_out=held_out)
        run.resume()
        start.is_set_up()
        yield run


def start_head(cfg: RewardModelTrainerConfig, actor: Learner) -> None:
    """Initializes the score head: keeps the checkpoint's, else zeros it or draws it with the run's seed."""
    if cfg.starts_from_head():
        return
    for chunk in actor.bare:
        for name, parameter in chunk.named_parameters():
            if name == VALUE_HEAD:
                std = (parameter.size(1) + 1) ** -0.5 if cfg.reward_model.head_start == "normal" else 0.0
                draw_head(parameter.data, std, cfg.run.seed)
    actor.optimizer.reload_model_params()
