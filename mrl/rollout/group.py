"""Engine nodes that come and go together: one, or those over which an engine is spread."""

from __future__ import annotations

from collections.abc import Sequence

from mrl.rollout.access import Access
from mrl.rollout.elsewhere import OtherNode
from mrl.rollout.errors import RolloutError
from mrl.rollout.process import Started
from mrl.rollout.registry import Sign
from mrl.rollout.spread import SpreadEngine


class Group:
    """As its nodes' signs say. lives: of the nodes, the one that answers requests first."""

    def __init__(self, signs: Sequence[Sign], access: Access) -> None:
        self.lives = tuple(sign.life for sign in signs)
        self.nodes = [OtherNode(sign.offered, access, may_leave=True) for sign in signs if sign.offered is not None]

    @property
    def where(self) -> str:
        """The nodes in words."""
        return ", ".join(node.offered.where for node in self.nodes)

    @property
    def engines(self) -> list[Started]:
        """Those that answer requests."""
        if len(self.nodes) == 1:
            return [*self.nodes[0].engines]
        return [GuestEngine([engine for node in self.nodes for engine in node.engines])]

    @property
    def broken(self) -> str | None:
        """Why its nodes must start anew before the group can come back; None if they need not."""
        has_ended = len(self.nodes) > 1 and any(engine.exit_code() is not None for engine in self.engines)
        return "a part of its engine has ended" if has_ended else None

    def look(self, lives: set[str]) -> None:
        """lives: that there are now. Without one of its nodes the group is gone."""
        for life, node in zip(self.lives, self.nodes, strict=True):
            node.is_gone |= life not in lives

    def close(self) -> None:
        """No more questions."""
        for node in self.nodes:
            node.close()


class GuestEngine(SpreadEngine):
    """Of engine nodes: gone with any of its parts, which these start again by themselves and come back with."""

    @property
    def is_gone(self) -> bool:
        """With a node, or with a part."""
        return super().is_gone or self.exit_code() is not None

    def restart(self) -> None:
        """Is its nodes' to do. Raises RolloutError."""
        raise RolloutError(f"{self.name}: an engine over several nodes is started again by these")
