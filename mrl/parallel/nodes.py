"""Which ranks share a node. A node is what one launcher has started: two launchers on a machine are two nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mrl.parallel.agreement import gather
from mrl.parallel.mesh import rank

NODE_VARIABLE = "GROUP_RANK"  # torchrun's and ft_launcher's number of themselves, in their ranks


@dataclass(frozen=True)
class Nodes:
    """The nodes of a world, as its launchers number them, whatever their host names.

    of: the node of ranks 0, 1, ...
    rank: this one
    """

    of: tuple[int, ...]
    rank: int

    @classmethod
    def gathered(cls) -> Nodes:
        """Of the world that is there. Collective. Ranks that no elastic launcher has started are all on node 0."""
        return cls(tuple(gather(int(os.environ.get(NODE_VARIABLE, "0")))), rank())

    @property
    def mine(self) -> int:
        """This rank's node."""
        return self.of[self.rank]

    @property
    def all(self) -> tuple[int, ...]:
        """Every node, each once, ascending."""
        return tuple(sorted(set(self.of)))

    def ranks(self, node: int) -> list[int]:
        """Those on `node`, ascending."""
        return [number for number, there in enumerate(self.of) if there == node]

    @property
    def is_first(self) -> bool:
        """Whether this is its node's first rank, which does what is done once a node."""
        return self.ranks(self.mine)[0] == self.rank
