"""Settings about failures and restarts that contradict each other, or that would have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.problems import Problem
from mrl.config.rl_checks import inert
from mrl.config.schema import RLConfig, SectionTimeouts, SFTConfig


def check(cfg: RLConfig | SFTConfig) -> Iterator[Problem]:
    saves, key = cfg.checkpoint.every_steps is not None, "checkpoint.every_steps"
    if cfg.run.launcher != "ft":
        because = f"launcher {cfg.run.launcher} restarts no ranks, and does not watch them"
        yield from inert(cfg.run, "run", ["max_restarts"], because, "run.launcher")
        yield from inert(cfg.resilience, "resilience", ["timeouts_s"], because, "run.launcher")
    elif not saves:
        message = "ft goes on from the last checkpoint after a restart, and none is written"
        yield Problem(("run.launcher", key), message)
    if not saves:
        yield from inert(cfg.resilience, "resilience", ["save_deadline_s"], "no checkpoints are written", key)
    if cfg.resilience.straggler_ratio <= 1:
        message = f"must be greater than 1, got {cfg.resilience.straggler_ratio:g}: a rank is always as slow as itself"
        yield Problem(("resilience.straggler_ratio",), message)
    yield from _timeouts(cfg.resilience.timeouts_s, isinstance(cfg, RLConfig))


def _timeouts(timeouts: SectionTimeouts, is_rl: bool) -> Iterator[Problem]:
    key = "resilience.timeouts_s"
    if not is_rl:
        yield from inert(timeouts, key, ["rollout", "reward", "sync"], "sft does not sample", "trainer")
    elif timeouts.reward > timeouts.rollout:
        message = f"{timeouts.reward:g} s is never reached: the rollout, of which rewards are a part, has less"
        yield Problem((f"{key}.reward", f"{key}.rollout"), message)
