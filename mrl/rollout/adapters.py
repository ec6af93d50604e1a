"""Settings that the engines of a run are started with, beyond the section `rollout`."""

from __future__ import annotations

from mrl.config.engines import ENGINES
from mrl.config.schema import RLConfig, RolloutConfig
from mrl.families import engine_arch
from mrl.families.adapters import adapted_parts
from mrl.rollout.routed import ASK

AT_ONCE = 2  # adapters in memory: the one that is drawn with, and that there is none


def started_with(cfg: RLConfig) -> RolloutConfig:
    """Returns the run's rollout settings, with SGLang's arguments for adapters and routed experts where needed."""
    rollout, words = cfg.engines()[0], list[str]()
    if cfg.actor.routing_replay == "engine" and "server_args" not in ENGINES[cfg.rollout.engine].ignores:
        words.append(ASK)
    if cfg.sync.lora == "adapter":
        lora = cfg.actor.lora
        assert lora is not None
        parts = adapted_parts(engine_arch(cfg.model.path), lora.spec)
        words += ["--enable-lora", "--max-lora-rank", str(lora.rank), "--max-loras-per-batch", str(AT_ONCE)]
        words += ["--lora-target-modules", *parts]
    return rollout.model_copy(update={"server_args": (*words, *rollout.server_args)})
