"""Maximum time that rank 0 waits for samples, from the limits of everything it waits for."""

from __future__ import annotations

import math

from mrl.config.schema import RLConfig
from mrl.config.trainers.rl import most_samples_per_step
from mrl.reward.manager import longest_call_s


def longest_wait(cfg: RLConfig) -> float:
    """Seconds that may pass on rank 0 without a response, a score, a turn or an engine: the longest time-out of any of
    them, and run.timeout_s on top. However many there are, each one that comes starts the clock anew."""
    rollout, agent = cfg.rollout, cfg.agent
    limits = [rollout.request_timeout_s, rollout.startup_timeout_s, longest_call_s(cfg.reward), cfg.sync.timeout_s]
    if cfg.teacher is not None:
        limits.append(cfg.teacher.timeout_s)
    if agent is not None:  # one that fails is begun anew
        limits.append((agent.retries + 1) * agent.step_timeout_s)
    if cfg.placement.is_apart:
        limits.append(cfg.placement.wait_s)
    return cfg.run.timeout_s + max(limits)


def longest_turn(cfg: RLConfig) -> float:
    """Seconds until an agent's program has its turn at the latest: all that were asked for with it are drawn in turn,
    and engines are started again."""
    rollout = cfg.rollout
    samples = max(most_samples_per_step(cfg) * (1 + rollout.max_staleness), rollout.concurrent_requests)
    rounds = math.ceil(samples / rollout.concurrent_requests) + rollout.max_restarts
    return rounds * rollout.request_timeout_s + rollout.max_restarts * rollout.startup_timeout_s
