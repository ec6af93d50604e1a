"""Engine nodes that come and go together: one, or those over which an engine is spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mrl.rollout.access import Access
from mrl.rollout.elsewhere import ElsewhereEngine, OtherNode
from mrl.rollout.errors import RolloutError
from mrl.rollout.process import Started
from mrl.rollout.registry import Sign


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
        return [SpreadEngine([engine for node in self.nodes for engine in node.engines])]

    def look(self, lives: set[str]) -> None:
        """lives: that there are now. Without one of its nodes the group is gone."""
        for life, node in zip(self.lives, self.nodes, strict=True):
            node.is_gone |= life not in lives

    def close(self) -> None:
        """No more questions."""
        for node in self.nodes:
            node.close()


class SpreadEngine:
    """An engine over several nodes, as one of them; a `Started`. It is gone with any of its parts: the nodes start it
    again by themselves, and come back with it.

    parts: the first one answers requests
    """

    def __init__(self, parts: Sequence[ElsewhereEngine]) -> None:
        self._parts = parts
        first = parts[0]
        self.name, self.url = f"{first.name} and {len(parts) - 1} more", first.url
        self.log: Path = first.log

    @property
    def is_gone(self) -> bool:
        """With a node, or with a part."""
        return any(part.is_gone or part.exit_code() is not None for part in self._parts)

    def exit_code(self) -> int | None:
        """Of the part that ended first, as far as has been heard."""
        return next((code for part in self._parts if (code := part.exit_code()) is not None), None)

    def is_ready(self, timeout_s: float) -> bool:
        """Whether the first part answers, which is when all are there."""
        return self._parts[0].is_ready(timeout_s)

    def restart(self) -> None:
        """Is its nodes' to do. Raises RolloutError."""
        raise RolloutError(f"{self.name}: an engine over several nodes is started again by these")

    def obituary(self) -> str:
        """What ended the part that has ended."""
        ended = next((part for part in self._parts if part.exit_code() is not None), self._parts[0])
        return ended.obituary()
