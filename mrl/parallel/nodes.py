"""Mapping of ranks to nodes. A node is one launcher's processes: two launchers on a machine are two nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mrl.parallel.error_check import gather
from mrl.parallel.mesh import rank

NODE_VARIABLE = "GROUP_RANK"  # the launcher's number, which torchrun and ft_launcher set for their ranks


@dataclass(frozen=True)
class Nodes:
    """Nodes of a world, as numbered by its launchers, whatever their host names.

    of: the node of ranks 0, 1, ...
    rank: this rank
    """

    of: tuple[int, ...]
    rank: int

    @classmethod
    def gathered(cls) -> Nodes:
        """Builds the nodes of the current world. Collective. Without an elastic launcher all ranks are on node 0."""
        return cls(tuple(gather(int(os.environ.get(NODE_VARIABLE, "0")))), rank())

    @property
    def mine(self) -> int:
        """Node of this rank."""
        return self.of[self.rank]

    @property
    def all(self) -> tuple[int, ...]:
        """The distinct node numbers, ascending."""
        return tuple(sorted(set(self.of)))

    def ranks(self, node: int) -> list[int]:
        """Returns the ranks on `node`, ascending."""
        return [number for number, there in enumerate(self.of) if there == node]

    @property
    def is_first(self) -> bool:
        """True on the first rank of each node, which does the work needed once per node."""
        return self.ranks(self.mine)[0] == self.rank
