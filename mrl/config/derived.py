"""Numbers that follow from any configuration: worlds and data-parallel sizes. Printed at start."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from mrl.config.sections.models import ParallelConfig
from mrl.config.trainers.base import AnyConfig


@dataclass(frozen=True)
class Machine:
    """The world that a configuration is checked for.

    world_size: ranks in all; local_world_size: of these, on this machine
    gpus: devices on this machine, 0 for a CPU machine, None when nobody has looked
    joined: the world was started by somebody else (torchrun, ft_launcher)
    planned: it is elsewhere, and of all files that a run reads only config.json has to be here
    alone: it is to be started on this machine and on no other
    """

    world_size: int
    local_world_size: int
    gpus: int | None = None
    joined: bool = False
    planned: bool = False
    alone: bool = False

    @classmethod
    def from_environment(cls, gpus: int) -> Machine:
        """The world that a launcher has put this process in, by its environment; without one, a world of one."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), gpus, joined=True)

    @classmethod
    def for_launch(cls, cfg: AnyConfig, gpus: int | None = None, nodes: int = 1) -> Machine:
        """The world that `mrl train` starts on this machine, or on `nodes` like it. Alone, of a run that is made for
        several: the whole of it, which the checks refuse to start here."""
        smallest, whole = smallest_world(cfg), nodes if nodes > 1 else cfg.run.nodes or 1
        nproc = cfg.run.nproc or (smallest if nodes == 1 else gpus or -(-smallest // nodes))
        return cls(nproc * whole, nproc, gpus, alone=nodes == 1)


def model_size(layout: ParallelConfig) -> int:
    """Ranks that hold one copy of the model."""
    return layout.tensor * layout.pipeline * layout.context


def expert_size(layout: ParallelConfig) -> int:
    """Ranks that hold one copy of the expert layers."""
    return layout.expert_tensor_size * layout.expert * layout.pipeline


def layouts(cfg: AnyConfig) -> dict[str, ParallelConfig]:
    """The layout of every model that the run builds, by the key that holds it."""
    uses = cfg.models().items()
    return {f"{name}.parallel": use.parallel for name, use in uses if use.parallel is not None}


def asks_for_transformer_engine(cfg: AnyConfig) -> list[str]:
    """The keys that do."""
    trains = ((name, use.train) for name, use in cfg.models().items())
    return [f"{name}.layers" for name, train in trains if train is not None and train.layers == "transformer_engine"]


def is_on_one_machine(cfg: AnyConfig) -> bool:
    """With all engines: the ranks that `mrl train` starts may have to reach given ones elsewhere, by nccl (by gloo
    they do it over an address of their own choice: mrl.weights.sync.transports.distributed)."""
    given = all(urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1") for url in cfg.given_urls())
    return given and cfg.engine_nodes() is None


def smallest_world(cfg: AnyConfig) -> int:
    """The fewest ranks over which every layout of the run can be laid out."""
    return math.lcm(*(math.lcm(model_size(p), expert_size(p)) for p in layouts(cfg).values()))


def data_parallel(layout: ParallelConfig, world_size: int) -> int:
    return world_size // model_size(layout)


def stage_layers(layout: ParallelConfig, num_layers: int) -> tuple[int, ...]:
    """Layers of each pipeline stage, all its chunks together."""
    if layout.pipeline == 1:
        return (num_layers,)
    ends = (layout.first_stage_layers, layout.last_stage_layers)
    inner = layout.pipeline - sum(end is not None for end in ends)
    each = (num_layers - sum(end or 0 for end in ends)) // inner if inner else 0
    first, last = (each if end is None else end for end in ends)
    return (first, *[each] * (layout.pipeline - 2), last)


def first_chunk_layers(layout: ParallelConfig, num_layers: int) -> int:
    """Layers beside the embedding: of the first stage's first chunk."""
    return stage_layers(layout, num_layers)[0] // (layout.virtual_pipeline or 1)


def summary(cfg: AnyConfig, world_size: int) -> list[tuple[str, str]]:
    """Name and value of everything a reader would otherwise have to work out."""
    steps = "" if cfg.steps_follow_data() else f"{cfg.run.steps} steps, "
    rows = [("run", f"{cfg.run.root}/{cfg.run.name}, {steps}seed {cfg.run.seed}")]
    rows += [
        (key.removesuffix(".parallel"), f"{_layout(layout, world_size)} over {_ranks(world_size)}")
        for key, layout in layouts(cfg).items()
    ]
    return [*rows, *cfg.summary()]


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _layout(layout: ParallelConfig, world_size: int) -> str:
    sizes = {
        "TP": layout.tensor,
        "PP": layout.pipeline,
        "VPP": layout.virtual_pipeline or 1,
        "CP": layout.context,
        "EP": layout.expert,
        "DP": data_parallel(layout, world_size),
    }
    return " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one replica"
