"""Section `placement`: engines on the trainer's nodes or on separate nodes."""

from __future__ import annotations

from typing import Literal

from mrl.options.base import PositiveFloat, PositiveInt, Section


class PlacementConfig(Section):
    """Placement of the engines. colocated: every trainer node starts rollout.servers engines. disaggregated: engines
    have separate nodes, on each of which `mrl serve` starts rollout.servers; no GPU is shared with the trainer.
    """

    mode: Literal["colocated", "disaggregated"] = "colocated"  # on the trainer's nodes, or on separate nodes
    # engine nodes that the run waits for before its first step; later, nodes may join or leave as long as one remains
    nodes: PositiveInt = 1
    # nodes that each engine spans, with tensor / nodes_per_engine GPUs on each; sglang only
    nodes_per_engine: PositiveInt = 1
    wait_s: PositiveFloat = 900.0  # maximum seconds to wait for these nodes, and for a new one when none is left
    silence_s: PositiveFloat = 30.0  # seconds without an answer after which a node, or the run, counts as gone
    away_s: PositiveFloat = 3600.0  # seconds without a run after which `mrl serve` ends

    # address of the trainer's first node that engine nodes reach; default: that of its default route
    address: str | None = None

    @property
    def is_apart(self) -> bool:
        """True if no trainer node has an engine."""
        return self.mode == "disaggregated"

    @property
    def groups(self) -> int:
        """Number of node groups that the run waits for; the nodes of a group share their engines."""
        return self.nodes // self.nodes_per_engine
