"""World sizes and data-parallel sizes derived from any configuration. `summary` is printed at start."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from mrl.config.sections.models import ParallelConfig
from mrl.config.trainers.base import AnyConfig


@dataclass(frozen=True)
class Machine:
    """The machine and world that a configuration is checked for.

    Attributes:
        world_size: total number of ranks
        local_world_size: number of ranks on this machine
        gpus: GPUs of this machine; 0: a CPU machine; None: unknown
        joined: another launcher (torchrun, ft_launcher) started the world
        planned: the run takes place elsewhere (`mrl plan`); only the config.json of each model has to exist here
        alone: the run starts on this machine only
    """

    world_size: int
    local_world_size: int
    gpus: int | None = None
    joined: bool = False
    planned: bool = False
    alone: bool = False

    @classmethod
    def from_environment(cls, gpus: int) -> Machine:
        """Returns the world of this process from WORLD_SIZE and LOCAL_WORLD_SIZE; one rank if they are not set."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), gpus, joined=True)

    @classmethod
    def for_launch(cls, cfg: AnyConfig, gpus: int | None = None, nodes: int = 1) -> Machine:
        """Returns the world that `mrl train` starts on this machine, or on `nodes` machines of the same kind.

        With nodes=1 and run.nodes > 1, returns the full world of run.nodes machines with alone=True. The checks then
        refuse to start the run on this machine only.
        """
        smallest, whole = smallest_world(cfg), nodes if nodes > 1 else cfg.run.nodes or 1
        nproc = cfg.run.nproc or (smallest if nodes == 1 else gpus or -(-smallest // nodes))
        return cls(nproc * whole, nproc, gpus, alone=nodes == 1)


def model_size(layout: ParallelConfig) -> int:
    """Returns the number of ranks that hold one copy of the model."""
    return layout.tensor * layout.pipeline * layout.context


def expert_size(layout: ParallelConfig) -> int:
    """Returns the number of ranks that hold one copy of the expert layers."""
    return layout.expert_tensor_size * layout.expert * layout.pipeline


def layouts(cfg: AnyConfig) -> dict[str, ParallelConfig]:
    """Returns the layout of every model that the run builds, by its key."""
    uses = cfg.models().items()
    return {f"{name}.parallel": use.parallel for name, use in uses if use.parallel is not None}


def asks_for_transformer_engine(cfg: AnyConfig) -> list[str]:
    """Returns the keys with `layers: transformer_engine`."""
    trains = ((name, use.train) for name, use in cfg.models().items())
    return [f"{name}.layers" for name, train in trains if train is not None and train.layers == "transformer_engine"]


def is_on_one_machine(cfg: AnyConfig) -> bool:
    """True if the trainer and all engines are on this machine.

    Relevant to NCCL: trainer ranks may have to reach engines at given addresses on other machines. With gloo,
    mrl.weights.sync.transports.distributed chooses the address itself.
    """
    given = all(urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1") for url in cfg.given_urls())
    return given and cfg.engine_nodes() is None


def smallest_world(cfg: AnyConfig) -> int:
    """Returns the smallest world size that every layout of the run divides."""
    return math.lcm(*(math.lcm(model_size(p), expert_size(p)) for p in layouts(cfg).values()))


def data_parallel(layout: ParallelConfig, world_size: int) -> int:
    return world_size // model_size(layout)


def stage_layers(layout: ParallelConfig, num_layers: int) -> tuple[int, ...]:
    """Returns the number of layers of each pipeline stage, over all of its virtual chunks."""
    if layout.pipeline == 1:
        return (num_layers,)
    ends = (layout.first_stage_layers, layout.last_stage_layers)
    inner = layout.pipeline - sum(end is not None for end in ends)
    each = (num_layers - sum(end or 0 for end in ends)) // inner if inner else 0
    first, last = (each if end is None else end for end in ends)
    return (first, *[each] * (layout.pipeline - 2), last)


def first_chunk_layers(layout: ParallelConfig, num_layers: int) -> int:
    """Returns the number of layers of the first virtual chunk of the first stage, which also has the embedding."""
    return stage_layers(layout, num_layers)[0] // (layout.virtual_pipeline or 1)


def summary(cfg: AnyConfig, world_size: int) -> list[tuple[str, str]]:
    """Returns (name, value) rows of derived settings, for the lines that are printed at start."""
    steps = "" if cfg.steps_follow_data() else f"{cfg.run.steps} steps, "
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    rows = [("run", f"{cfg.run.root}/{cfg.run.name}, {steps}seed {cfg.run.seed}")]
    rows += [
        (key.removesuffix(".parallel"), f"{layout_text(layout, data_parallel(layout, world_size))} over {ranks}")
        for key, layout in layouts(cfg).items()
    ]
    return [*rows, *cfg.summary()]


def layout_text(p: ParallelConfig, dp: int) -> str:
    """Returns the layout as text, such as "TP2 x PP4 x DP8". `dp`: its data-parallel size."""
    sizes = {"TP": p.tensor, "PP": p.pipeline, "VPP": p.virtual_pipeline or 1, "CP": p.context, "EP": p.expert}
    sizes |= {"ETP": p.expert_tensor_size if p.expert > 1 else 1, "DP": dp}
    return " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one replica"
