"""Checks of the run directory, checkpoints, failures and restarts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mrl.config import resume
from mrl.config.checks.base import without_effect
from mrl.config.derived import Machine
from mrl.config.problems import Problem, printable, reason
from mrl.config.sections.run import RunConfig
from mrl.config.trainers.base import AnyConfig

LONGEST_NAME, LONGEST_PATH = 200, 3000  # bytes; leaves room for the names of files below
HUB_NAME = re.compile(r"\w[\w-]*/\w[\w.-]{,94}\w", re.ASCII)


def check(cfg: AnyConfig, machine: Machine) -> Iterator[Problem]:
    """Checks the sections `run`, `checkpoint` and `resilience`."""
    yield from _directory(cfg.run)
    if len(set(cfg.run.trackers)) < len(cfg.run.trackers):
        yield Problem(("run.trackers",), "names a tracker twice")
    for name in ("wandb", "mlflow", "trackio", "swanlab"):
        if name not in cfg.run.trackers:
            yield from without_effect(cfg.run, "run", [name], f"{name} is not among the trackers", "run.trackers")
    yield from _profile(cfg, machine)
    yield from _checkpoint(cfg)
    yield from _resilience(cfg)


def _directory(run: RunConfig) -> Iterator[Problem]:
    """Checks that ROOT/NAME can be created or written to."""
    if run.name in ("", ".", "..") or "/" in run.name:
        yield Problem(("run.name",), f"{run.name!r} must be one plain directory name (run.root holds the path)")
    for key, text, longest in (("run.name", run.name, LONGEST_NAME), ("run.root", run.root, LONGEST_PATH)):
        if text != printable(text):
            return  # `all.check` reports this error
        if len(text.encode()) > longest:
            yield Problem((key,), f"{len(text.encode())} bytes long; the maximum is {longest}")
            return
    root = Path(run.root).absolute()
    try:
        there = next(path for path in (root, *root.parents) if path.exists())
    except OSError as error:
        yield Problem(("run.root",), reason(error))
        return
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        said = "is not writable" if there.is_dir() else "is not a directory"
        yield Problem(("run.root",), f"{there} {said}, and the run directory is created below run.root")


def _profile(cfg: AnyConfig, machine: Machine) -> Iterator[Problem]:
    """Checks for steps and ranks that do not exist, and for tools that this run or machine cannot use."""
    profile, history = cfg.run.profile, cfg.run.memory_history
    if profile is not None:
        if not profile.steps:
            yield Problem(("run.profile.steps", "run.steps"), "names no step")
        yield from _steps_and_ranks(cfg, machine, "run.profile", profile.steps, profile.ranks)
        if profile.tool == "nsys" and cfg.run.launcher != "mrl":
            message = f"{cfg.run.launcher} starts the ranks itself, without nsys: use launcher: mrl, or tool: torch"
            yield Problem(("run.launcher", "run.profile.tool"), message)
        if profile.tool == "nsys" and machine.world_size > machine.local_world_size:
            yield Problem(("run.profile.tool", "run.nodes"), "nsys profiles the ranks of one machine: use tool: torch")
    if history is None:
        return
    if not (history.steps or history.on_out_of_memory):
        yield Problem(("run.memory_history",), "writes no snapshot: name steps, or set on_out_of_memory: true")
    yield from _steps_and_ranks(cfg, machine, "run.memory_history", history.steps, history.ranks)
    if machine.gpus == 0:
        message = "records the allocator of CUDA, and this machine has no GPUs: leave it out"
        yield Problem(("run.memory_history",), f"{message} (metrics memory/resident_gib/*)")


def _steps_and_ranks(
    cfg: AnyConfig, machine: Machine, key: str, steps: tuple[int, ...], ranks: tuple[int, ...]
) -> Iterator[Problem]:
    late = [step for step in steps if step > cfg.run.steps and not cfg.steps_follow_data()]
    if late:
        message = f"step {', '.join(map(str, late))} is after the last step, {cfg.run.steps}"
        yield Problem((f"{key}.steps", "run.steps"), message)
    none = [rank for rank in ranks if rank >= machine.world_size]
    if none or not ranks:
        message = f"rank {', '.join(map(str, none))} does not exist: ranks are 0 to {machine.world_size - 1}"
        yield Problem((f"{key}.ranks",), message if none else "names no rank")


def _checkpoint(cfg: AnyConfig) -> Iterator[Problem]:
    """Checks for settings of checkpoints and uploads that are never made."""
    checkpoint, every, hub = cfg.checkpoint, "checkpoint.every_steps", "checkpoint.push_to_hub"
    kept, repository = checkpoint.keep_every_steps, checkpoint.push_to_hub
    if checkpoint.every_steps is None:
        names = ["keep_last", "keep_every_steps", "asynchronous", "writers"]
        yield from without_effect(checkpoint, "checkpoint", names, "no checkpoints are written", every)
    elif kept is not None and kept % checkpoint.every_steps:
        message = f"{kept} is not a multiple of {checkpoint.every_steps}, the steps at which checkpoints are written"
        yield Problem(("checkpoint.keep_every_steps", every), message)
    if repository is None:
        yield from without_effect(checkpoint, "checkpoint", ["hub_private"], "nothing is uploaded", hub)
        if checkpoint.every_steps is None:
            because = "neither are checkpoints written, nor is anything uploaded"
            yield from without_effect(checkpoint, "checkpoint", ["timeout_s"], because, every)
    elif not HUB_NAME.fullmatch(repository) or "--" in repository or ".." in repository:
        yield Problem((hub,), f"{repository!r} is not the name of a repository: expected OWNER/NAME")
    if repository is not None and not checkpoint.export_hf:
        yield Problem((hub, "checkpoint.export_hf"), "uploads RUN_DIR/hf, which is not written: set export_hf: true")
    for key in checkpoint.accept_changes:
        if not resume.is_key(type(cfg), key):
            yield Problem(("checkpoint.accept_changes",), f"{key!r} is not a key of this configuration")


def _resilience(cfg: AnyConfig) -> Iterator[Problem]:
    """Checks for limits that nothing monitors or that are never reached, and for restarts without a checkpoint."""
    saves, key = cfg.checkpoint.every_steps is not None, "checkpoint.every_steps"
    timeouts, of = cfg.resilience.timeouts_s, "resilience.timeouts_s"
    if cfg.run.launcher != "ft":
        because = f"launcher {cfg.run.launcher} neither monitors nor restarts ranks"
        yield from without_effect(cfg.run, "run", ["max_restarts"], because, "run.launcher")
        yield from without_effect(cfg.resilience, "resilience", ["timeouts_s"], because, "run.launcher")
    elif not saves:
        message = "ft resumes from the last checkpoint after a restart, and none is written: set checkpoint.every_steps"
        yield Problem(("run.launcher", key), message)
    if not saves:
        yield from without_effect(cfg.resilience, "resilience", ["save_deadline_s"], "no checkpoints are written", key)
    if others := [name for name in ("rollout", "reward", "sync") if name not in cfg.timed_parts()]:
        what = "scores during the rollout, and has no weight sync" if cfg.is_sampling else "does not generate"
        yield from without_effect(timeouts, of, others, f"trainer {cfg.trainer} {what}", "trainer")
    elif timeouts.reward > timeouts.rollout:
        message = f"{timeouts.reward:g} s is never reached: the rollout includes rewards and has {timeouts.rollout:g} s"
        yield Problem((f"{of}.reward", f"{of}.rollout"), message)
