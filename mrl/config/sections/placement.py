"""Where the engines are: on the trainer's nodes, or on nodes of their own."""

from __future__ import annotations

from typing import Literal

from mrl.config.sections.base import PositiveFloat, PositiveInt, Section


class PlacementConfig(Section):
    """Where the engines are. colocated: every node of the trainer starts rollout.servers of its own. disaggregated:
    they have nodes of their own, on each of which `mrl serve` starts rollout.servers; the trainer's GPUs are its alone.
    """

    mode: Literal["colocated", "disaggregated"] = "colocated"  # on the trainer's nodes, or on others
    # engine nodes that the run waits for before its first step; others may come later, and go while one is left
    nodes: PositiveInt = 1
    # consecutive nodes over which each engine is spread, tensor / nodes_per_engine GPUs on each; sglang only
    nodes_per_engine: PositiveInt = 1
    wait_s: PositiveFloat = 900.0  # seconds that the run waits for these nodes, and for one when none is left
    silence_s: PositiveFloat = 30.0  # without a sign of life that long, a node, or the run, counts as gone
    away_s: PositiveFloat = 3600.0  # seconds without a run after which `mrl serve` ends

    @property
    def is_apart(self) -> bool:
        """Whether no node of the trainer has an engine."""
        return self.mode == "disaggregated"

    @property
    def groups(self) -> int:
        """Of nodes that have their engines together, among those that are waited for."""
        return self.nodes // self.nodes_per_engine
