"""Supervised fine-tuning through the same learner: packed prompt + answer, loss over the answer's tokens."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import torch

from mrl import checkpoint, failure
from mrl.algo import aggregate
from mrl.config.schema import SFTConfig
from mrl.core import StepStats
from mrl.data import PromptDataset, load_tokenizer
from mrl.learner import Learner, losses
from mrl.models import load_arch
from mrl.observe import Recorder, RunDir, SilentRecorder
from mrl.trainers.world import World
from mrl.weights.export import save_hf


def main(cfg: SFTConfig) -> None:
    """Trains to `run.steps`, going on from the run directory's last checkpoint. Called on every rank."""
    with contextlib.ExitStack() as stack, failure.noted():
        world = World(cfg.run.timeout_s, cfg.run.timeout_s, cfg.run.seed)
        stack.callback(world.close)
        run_dir = Path(cfg.run.root) / cfg.run.name
        recorder: Recorder | SilentRecorder = SilentRecorder()

        def start_main_parts() -> None:
            nonlocal recorder
            stack.enter_context(RunDir.open(cfg))
            recorder = stack.enter_context(Recorder(run_dir, cfg.run.steps, tensorboard=cfg.run.tensorboard))

        world.from_main("starting the run", start_main_parts)
        actor = build_actor(cfg, world)
        start = resume(cfg, world, run_dir, actor, recorder)
        train(cfg, actor, recorder, run_dir, start)
        if cfg.checkpoint.export_hf:
            save_hf(actor.exporter, cfg.model.path, run_dir / "hf", overwrite=True)


def train(cfg: SFTConfig, actor: Learner, recorder: Recorder | SilentRecorder, run_dir: Path, start: int) -> None:
    data = PromptDataset(cfg.data.train, cfg.data, load_tokenizer(cfg.model.path), require_answer=True)
    for step in range(start, cfg.run.steps):
        stats, began = StepStats(step + 1), time.monotonic()
        batch = data.sft_rollout(step, cfg.batch.samples_per_step, cfg.run.seed)
        with recorder.phase("update", stats):
            weights = batch.flat(aggregate.token_weights("token-mean", batch.response_mask))
            metrics = actor.backward(batch, range(batch.num_samples), losses.cross_entropy(weights), temperature=1.0)
            metrics |= actor.step()
        stats.metrics = {name if "/" in name else f"actor/{name}": value for name, value in metrics.items()}
        stats.metrics["perf/tokens_per_s"] = batch.tokens.numel() / (time.monotonic() - began)
        every = cfg.checkpoint.every_steps
        if every and ((step + 1) % every == 0 or step + 1 == cfg.run.steps):
            with recorder.phase("checkpoint", stats):
                checkpoint.save(run_dir, step + 1, {"actor": actor}, {"step": step + 1}, cfg.checkpoint.keep_last)
        recorder.log(stats)


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


def resume(cfg: SFTConfig, world: World, run_dir: Path, actor: Learner, recorder: Recorder | SilentRecorder) -> int:
    path = world.from_main("looking for a checkpoint", lambda: checkpoint.latest(run_dir))
    if path is None:
        return 0
    step: int = checkpoint.load(path, {"actor": actor})["step"]
    recorder.note(f"continuing from {path} (step {step})")
    return step
