"""Coordinates of each rank in a layout, and its layers.

Megatron-Core's order: tensor parallelism innermost, then context, data and pipeline; experts are sharded over the same
ranks in a separate order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mrl.config.derived import data_parallel, expert_size, stage_layers
from mrl.config.sections.models import ParallelConfig


@dataclass(frozen=True)
class RankCoordinates:
    """Coordinates of a rank in a layout, from 0. etp, ep, edp: of its expert layers."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Grid:
    """Layout over a world. Raises ValueError for a world that is no multiple of the layout."""

    layout: ParallelConfig
    world: int

    def __post_init__(self) -> None:
        p, needed = self.layout, expert_size(self.layout)
        if self.world % (p.tensor * p.pipeline * p.context) or self.world % needed:
            raise ValueError(f"{self.world} ranks are not a multiple of the ranks that the layout needs")

    @cached_property
    def dp(self) -> int:
        return data_parallel(self.layout, self.world)

    @cached_property
    def edp(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.world // expert_size(self.layout)

    def coordinates(self, rank: int) -> RankCoordinates:
        p = self.layout
        tp, cp, dp, pp = _digits(rank, (p.tensor, p.context, self.dp, p.pipeline))
        etp, ep, edp, _ = _digits(rank, (p.expert_tensor_size, p.expert, self.edp, p.pipeline))
        return RankCoordinates(rank, tp, cp, dp, pp, etp, ep, edp)

    @cached_property
    def all_coordinates(self) -> tuple[RankCoordinates, ...]:
        return tuple(self.coordinates(rank) for rank in range(self.world))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Returns the groups of ranks, ascending, that differ only in these coordinates ("tp", "dp", ..., or "etp",
        "ep", "edp").
        """
        mine = ("etp", "ep", "edp", "pp") if set(axes) & {"etp", "ep", "edp"} else ("tp", "cp", "dp", "pp")
        found: dict[tuple[int, ...], list[int]] = {}
        for coords in self.all_coordinates:
            key = tuple(vars(coords)[axis] for axis in mine if axis not in axes)
            found.setdefault(key, []).append(coords.rank)
        return [tuple(ranks) for ranks in found.values()]

    def spread(self, *axes: str, node: int) -> int:
        """Returns the number of nodes of `node` ranks that the widest such group spans."""
        if (axes, node) not in self._spreads:
            widest = max(len({rank // node for rank in ranks}) for ranks in self.groups(*axes))
            self._spreads[axes, node] = widest
        return self._spreads[axes, node]

    @cached_property
    def _spreads(self) -> dict[tuple[tuple[str, ...], int], int]:
        """Cache of `spread`."""
        return {}


def _digits(rank: int, sizes: Sequence[int]) -> Iterator[int]:
    for size in sizes:
        yield rank % size
        rank //= size


def chunk_layers(layout: ParallelConfig, num_layers: int, stage: int) -> list[range]:
    """Returns the layers of each chunk of a stage, counted from 0 over the whole model."""
    chunks = layout.virtual_pipeline or 1
    each = [layers // chunks for layers in stage_layers(layout, num_layers)]
    starts = [chunk * sum(each) + sum(each[:stage]) for chunk in range(chunks)]
    return [range(start, start + each[stage]) for start in starts]
