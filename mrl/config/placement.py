"""Assignment of a machine's GPUs to engines, and the GPUs that engines share with the trainer."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.checks.base import changed
from mrl.config.derived import Machine
from mrl.config.sections.rollout import RolloutConfig
from mrl.config.trainers.rl import RLConfig


def engine_gpus(rollout: RolloutConfig, machine: Machine, nodes_per_engine: int = 1) -> tuple[int, ...]:
    """Returns the GPU numbers of the engines that mrl starts on a node, engine by engine; empty without GPUs.

    Numbers count the GPUs that the node's first rank sees. An engine that spans several nodes has only its local GPUs
    here.
    """
    if rollout.urls or not machine.gpus:
        return ()
    here = rollout.servers * rollout.tensor // nodes_per_engine
    return rollout.gpus if rollout.gpus is not None else tuple(range(here))


def shared_gpus(rollout: RolloutConfig, machine: Machine, nodes_per_engine: int = 1) -> tuple[int, ...]:
    """Returns the GPUs that engines share with trainer ranks.

    Rank i of a machine uses GPU i, also if it sees that GPU only.
    """
    ranks = min(machine.local_world_size, machine.gpus or 0)
    return tuple(sorted({gpu for gpu in engine_gpus(rollout, machine, nodes_per_engine) if gpu < ranks}))


def gpus_with_engines(cfg: RLConfig, machine: Machine) -> tuple[int, ...]:
    """Returns the trainer's GPUs that engines share; empty if engines have separate nodes."""
    placement = cfg.placement
    return () if placement.is_apart else shared_gpus(cfg.rollout, machine, placement.nodes_per_engine)


def notes(rollout: RolloutConfig, machine: Machine, nodes_per_engine: int = 1) -> Iterator[str]:
    """Yields one-sentence notes for the user before the run starts, about engines on the trainer's nodes."""
    of_gpus = changed(rollout, "gpus", "memory_fraction") if not machine.gpus and not rollout.urls else []
    yield from (f"rollout.{name} has no effect: this machine has no GPUs" for name in of_gpus)
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
