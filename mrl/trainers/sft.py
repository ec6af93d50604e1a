"""Supervised fine-tuning through the same learner: packed prompt + answer, loss over the answer's tokens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mrl.algo import aggregate
from mrl.config.schema import SFTConfig
from mrl.data import PromptDataset, data_notes, load_tokenizer
from mrl.learner import losses
from mrl.trainers.shared.models import build_learner
from mrl.trainers.shared.run import Run, started
from mrl.trainers.shared.updates import named


@dataclass
class SFTRun(Run):
    cfg: SFTConfig
    data: PromptDataset


def main(cfg: SFTConfig) -> None:
    """Trains to `run.steps`, going on from the run directory's last checkpoint. Called on every rank."""
    with open_sft_run(cfg) as run:
        for step in run.steps():
            train_step(run, step)
        run.finish()


def train_step(run: SFTRun, step: int) -> None:
    stats, began = run.saving.new_stats(step + 1), time.monotonic()
    batch = run.data.sft_rollout(step, run.cfg.batch.samples_per_step, run.cfg.run.seed)
    samples = range(batch.num_samples)
    with run.phase("update", stats):
        loss = losses.cross_entropy(batch.flat(aggregate.token_weights("token-mean", batch.response_mask)))
        metrics = run.actor.backward(batch, samples, loss, temperature=1.0)
        metrics |= run.actor.step()
        run.updates.note("actor", run.actor, batch, samples, metrics)
        run.updates.end_of_step(step + 1)
    stats.metrics |= named("actor", metrics)
    stats.metrics |= run.speed.metrics(stats, batch, batch.tokens.numel(), time.monotonic() - began)
    run.phase.end_of_step(stats)
    run.recorder.log(stats)


@contextlib.contextmanager
def open_sft_run(cfg: SFTConfig) -> Iterator[SFTRun]:
    """Builds the run on every rank; closes files and process group on any exit."""
    with started(cfg) as start:
        actor = build_learner(cfg, start.world, "policy", None, cfg.actor)
        data = read_data(cfg, start.recorder.note)
        run = SFTRun(**vars(start.begin(actor)), data=data)
        run.resume()
        start.is_set_up()
        yield run


def read_data(cfg: SFTConfig, note: Callable[[str], None]) -> PromptDataset:
    """note: takes what was corrected in it or left out, a line each"""
    tokenizer = load_tokenizer(cfg.model.path, cfg.model.eos_token)
    data = PromptDataset(cfg.data.train, cfg.data, tokenizer, require_answer=True)
    for line in data_notes(tokenizer, {"data.train": data}):
        note(line)
    return data
