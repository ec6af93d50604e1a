"""How long rank 0 may be busy with samples, by the limits of all that it waits for."""

from __future__ import annotations

import math

from mrl.config.schema import RLConfig
from mrl.config.trainers.rl import most_samples_per_step
from mrl.reward.manager import longest_wait_s


def longest_wait(cfg: RLConfig) -> float:
    """Seconds that rank 0's sampling may take: every request in turn, each up to its own time-out, what agents'
    environments take between them, and all restarts of engines."""
    samples = max(most_samples_per_step(cfg), cfg.validation.prompts)
    steps = 1 + (cfg.rollout.max_staleness or 0)
    segments = cfg.rollout.sampling.max_new_tokens / (cfg.rollout.segment_tokens or cfg.rollout.sampling.max_new_tokens)
    turns = cfg.agent.max_turns * (cfg.agent.retries + 1) if cfg.agent is not None else 1
    rounds = turns * math.ceil(samples * steps * cfg.rollout.oversample * segments / cfg.rollout.concurrent_requests)
    return (
        cfg.run.timeout_s
        + cfg.rollout.startup_timeout_s
        + rounds * cfg.rollout.request_timeout_s
        + cfg.rollout.max_restarts * (cfg.rollout.startup_timeout_s + cfg.rollout.request_timeout_s)
        + longest_wait_s(cfg.reward, samples)
        + ((turns + 1) * cfg.agent.step_timeout_s if cfg.agent is not None else 0.0)
        + (cfg.placement.wait_s if cfg.placement.is_apart else 0.0)
    )
