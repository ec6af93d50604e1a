"""Placement: the coordinates of each rank in the layouts, and its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mrl.config.derived import Machine
from mrl.config.placement import engine_gpus
from mrl.config.trainers.base import Config
from mrl.plan.engine import EnginePlan
from mrl.plan.workload import PlannedModel


@dataclass(frozen=True)
class Placement:
    """Placement of a run over `world` ranks, `per_node` on each node.

    engine_of: the number of the engine on a rank's GPU, by rank
    beside: numbers of a node's engines that share no GPU with a rank, by node
    """

    models: Mapping[str, PlannedModel]
    world: int
    per_node: int
    engine_of: Mapping[int, int]
    beside: Mapping[int, tuple[int, ...]]

    @property
    def nodes(self) -> int:
        return -(-self.world // self.per_node)

    @classmethod
    def on_gpus(
        cls, models: Mapping[str, PlannedModel], world: int, per_node: int, engine: EnginePlan | None
    ) -> Placement:
        """Returns the planned placement; engine: None if no engine is on these GPUs or beside them."""
        if engine is None:
            return cls(models, world, per_node, {}, {})
        found = {rank: number for rank in range(world) if (number := engine.at(rank)) is not None}
        apart = tuple(number for number in range(engine.engines) if number not in found.values())
        return cls(models, world, per_node, found, {0: apart} if apart else {})

    @classmethod
    def of(cls, cfg: Config, models: Mapping[str, PlannedModel], machine: Machine) -> Placement:
        """Returns the placement of a started run: every node has its configured engines, if mrl starts them there."""
        world, per_node = machine.world_size, machine.local_world_size
        engines = cfg.engines()
        if engines is None or engines[0].urls or cfg.engine_nodes() is not None:
            return cls(models, world, per_node, {}, {})
        rollout, size = engines[0], cfg.nodes_per_engine()
        found: dict[int, int] = {}
        beside: dict[int, tuple[int, ...]] = {}
        shared = dict(enumerate(engine_gpus(rollout, machine, size)))
        here = rollout.servers * rollout.tensor // size  # GPUs of engines on a node
        for node in range(-(-world // per_node)):
            numbers = [(node * here + place) // rollout.tensor for place in range(here)]
            on = {gpu: numbers[place] for place, gpu in shared.items() if gpu < per_node}
            found |= {node * per_node + gpu: engine for gpu, engine in on.items()}
            if apart := tuple(number for number in dict.fromkeys(numbers) if number not in on.values()):
                beside[node] = apart
        return cls(models, world, per_node, found, beside)

    def data(self) -> dict[str, Any]:
        """Returns the placement as JSON-ready values."""
        return {
            "gpus": self.world,
            "gpus_of_a_node": self.per_node,
            "models": {
                name: {"layout": model.words, "role": model.role, "layers": model.kind, "trained": model.is_trained}
                for name, model in self.models.items()
            },
            "ranks": [
                {"rank": rank, "node": rank // self.per_node, "engine": self.engine_of.get(rank)}
                | {
                    name: {axis: at for axis, at in vars(model.grid.coordinates(rank)).items() if axis != "rank"}
                    for name, model in self.models.items()
                }
                for rank in range(self.world)
            ],
            "engines_beside": {str(node): list(numbers) for node, numbers in self.beside.items()},
        }
