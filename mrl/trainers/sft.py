"""Supervised fine-tuning through the same learner: packed prompt + answer, loss over the answer's tokens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mrl import failure
from mrl.algo import aggregate
from mrl.config.schema import SFTConfig
from mrl.data import PromptDataset, data_notes, load_tokenizer
from mrl.families import load_arch
from mrl.learner import Learner, losses
from mrl.observe import Recorder, SilentRecorder
from mrl.resilience import sections
from mrl.trainers.shared.checkpoints import Saving, open_run_dir
from mrl.trainers.shared.phases import Phases
from mrl.trainers.shared.updates import Updates
from mrl.trainers.shared.world import World


@dataclass
class SFTRun:
    cfg: SFTConfig
    actor: Learner
    data: PromptDataset
    recorder: Recorder | SilentRecorder
    phase: Phases
    saving: Saving
    updates: Updates
    start_step: int

    def save_now(self, deadline_s: float) -> int:
        """Between two steps; see `Saving.save_now`."""
        return self.saving.save_now(deadline_s)


def main(cfg: SFTConfig) -> None:
    """Trains to `run.steps`, going on from the run directory's last checkpoint. Called on every rank."""
    with open_sft_run(cfg) as run:
        for step in range(run.start_step, cfg.run.steps):
            run.phase.leave_if_warned(step, run.save_now if step > run.start_step else None)
            train_step(run, step)
            run.saving.after_step(step + 1)
        run.saving.finish()
        run.updates.end_of_run()


def train_step(run: SFTRun, step: int) -> None:
    stats, began = run.saving.new_stats(step + 1), time.monotonic()
    batch = run.data.sft_rollout(step, run.cfg.batch.samples_per_step, run.cfg.run.seed)
    with run.phase("update", stats):
        loss = losses.cross_entropy(batch.flat(aggregate.token_weights("token-mean", batch.response_mask)))
        samples = range(batch.num_samples)
        metrics = run.actor.backward(batch, samples, loss, temperature=1.0)
        metrics = run.updates.make("actor", run.actor, batch, samples, metrics)
        run.updates.end_of_step(step + 1)
    stats.metrics |= {name if "/" in name else f"actor/{name}": value for name, value in metrics.items()}
    stats.metrics["perf/tokens_per_s"] = batch.tokens.numel() / (time.monotonic() - began)
    run.phase.end_of_step(stats)
    run.recorder.log(stats)


@contextlib.contextmanager
def open_sft_run(cfg: SFTConfig) -> Iterator[SFTRun]:
    """Builds the run on every rank; closes files and process group on any exit."""
    with contextlib.ExitStack() as stack, failure.noted():
        world = World(cfg.run.timeout_s, cfg.run.timeout_s, cfg.run.seed)
        stack.callback(world.close)
        run_dir = Path(cfg.run.root) / cfg.run.name
        is_set_up = stack.enter_context(sections.watched(cfg.resilience.timeouts_s, run_dir))
        recorder: Recorder | SilentRecorder = SilentRecorder()

        def start() -> None:
            nonlocal recorder
            recorder = open_run_dir(cfg, run_dir, stack)

        world.from_main("starting the run", start)
        run = build_run(cfg, world, run_dir, recorder)
        stack.callback(run.saving.close)
        state = run.saving.resume()
        if state is not None:
            run.start_step, run.updates.in_a_row = state["step"], state["nonfinite_in_a_row"]
            run.updates.unlearned = state.get("unlearned", [])
        is_set_up()
        yield run


def build_run(cfg: SFTConfig, world: World, run_dir: Path, recorder: Recorder | SilentRecorder) -> SFTRun:
    actor, tokenizer = build_actor(cfg, world), load_tokenizer(cfg.model.path, cfg.model.eos_token)
    data = PromptDataset(cfg.data.train, cfg.data, tokenizer, require_answer=True)
    for note in data_notes(tokenizer, {"data.train": data}):
        recorder.note(note)

    phase = Phases.of(cfg.resilience, world, run_dir, recorder, peers=actor.mesh.pp_rank)
    updates = Updates(run_dir, cfg.run.max_nonfinite_steps, recorder, writes=world.is_main)

    def loop_state() -> dict[str, Any]:
        return {"nonfinite_in_a_row": updates.in_a_row, "unlearned": updates.unlearned}

    saving = Saving(cfg, phase, {"actor": actor}, loop_state)
    return SFTRun(cfg, actor, data, recorder, phase, saving, updates, start_step=0)


def build_actor(cfg: SFTConfig, world: World) -> Learner:
    return Learner(
        "policy",
        load_arch(cfg.model.path),
        cfg.model.path,
        cfg.actor,
        world.meshes.get(cfg.actor.parallel),
        dtype=getattr(torch, cfg.model.dtype),
        seed=cfg.run.seed,
        from_scratch=cfg.model.from_scratch,
        allow_pickle=cfg.model.allow_pickle,
    )
