"""An engine that is larger than a node, as one of them: a part of it is on each of several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mrl.rollout.elsewhere import ElsewhereEngine
from mrl.rollout.process import EngineProcess, Started

Member = EngineProcess | ElsewhereEngine


class SpreadEngine:
    """A `Started`. With any of its parts all end, and are started again together.

    parts: of this node or others; the first one answers requests
    """

    def __init__(self, parts: Sequence[Member]) -> None:
        self._parts = parts
        first = parts[0]
        self.name, self.url = f"{first.name} and {len(parts) - 1} more", first.url
        self.log: Path = first.log

    @property
    def is_gone(self) -> bool:
        """With a node that is."""
        return any(part.is_gone for part in self._parts)

    @property
    def here(self) -> list[EngineProcess]:
        """Its part on this node."""
        return [process for part in self._parts for process in part.here]

    def exit_code(self) -> int | None:
        """Of the part that ended first, as far as has been heard."""
        return next((code for part in self._parts if (code := part.exit_code()) is not None), None)

    def is_ready(self, timeout_s: float) -> bool:
        """Whether the first part answers, which is when all are there. Raises EngineStartError as soon as one has
        ended: the others would wait for it."""
        return all(part.is_ready(timeout_s) for part in reversed(self._parts))

    def restart(self) -> None:
        """Ends all parts and only then starts them anew, at the same addresses: none meets one from before."""
        with ThreadPoolExecutor(len(self._parts)) as pool:
            for step in (lambda part: part.close(), lambda part: part.restart()):
                for done in [pool.submit(step, part) for part in self._parts]:
                    done.result()

    def exit_report(self) -> str:
        """What ended the part that has ended."""
        ended = next((part for part in self._parts if part.exit_code() is not None), self._parts[0])
        return ended.exit_report()


def joined(parts: Sequence[Member], nodes: int) -> list[Started]:
    """The engines that these are, or are parts of, over so many nodes each; parts in the order of their nodes."""
    if nodes == 1:
        return [*parts]
    return [SpreadEngine(parts[first : first + nodes]) for first in range(0, len(parts), nodes)]
