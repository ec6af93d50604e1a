"""Which GPUs of the machine the engines have, and which of those are the trainer's too."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.derived import Machine
from mrl.config.sections.rollout import RolloutConfig
from mrl.config.trainers.rl import RLConfig


def engine_gpus(rollout: RolloutConfig, machine: Machine, nodes_per_engine: int = 1) -> tuple[int, ...]:
    """Numbers among the GPUs that a node's first rank sees, for each engine that mrl starts there, or its part there,
    one engine after the other; none without GPUs."""
    if rollout.urls or not machine.gpus:
        return ()
    here = rollout.servers * rollout.tensor // nodes_per_engine
    return rollout.gpus if rollout.gpus is not None else tuple(range(here))


def shared_gpus(rollout: RolloutConfig, machine: Machine, nodes_per_engine: int = 1) -> tuple[int, ...]:
    """Those that ranks of the trainer have too: rank i of a machine has GPU i, or is shown its own one alone."""
    ranks = min(machine.local_world_size, machine.gpus or 0)
    return tuple(sorted({gpu for gpu in engine_gpus(rollout, machine, nodes_per_engine) if gpu < ranks}))


def gpus_with_engines(cfg: RLConfig, machine: Machine) -> tuple[int, ...]:
    """Those of the trainer that an engine has too: none where engines have nodes of their own."""
    placement = cfg.placement
    return () if placement.is_apart else shared_gpus(cfg.rollout, machine, placement.nodes_per_engine)


def notes(rollout: RolloutConfig, machine: Machine, nodes_per_engine: int = 1) -> Iterator[str]:
    """What the user should know before the run starts, one sentence each. Of engines on the trainer's nodes."""
    if not machine.gpus and rollout.gpus is not None:
        yield "rollout.gpus has no effect: this machine has no GPUs"
    if machine.gpus and rollout.threads is not None:
        yield "rollout.threads has no effect: the engines are on GPUs"
    shared = shared_gpus(rollout, machine, nodes_per_engine)
    if shared and rollout.release == "none":
        fraction = rollout.memory_fraction
        yield (
            f"GPU {', '.join(map(str, shared))}: an engine and a trainer rank share it with rollout.release: none. "
            f"The engine keeps {fraction:g} of the memory that models leave free (rollout.memory_fraction), and "
            f"updates have the other {1 - fraction:g}"
        )
