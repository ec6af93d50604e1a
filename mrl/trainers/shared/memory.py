"""Memory of a run by the phases of a step: the models' and the engines', moved by a table and by nothing else.

All ranks move at the same point. What one of them cannot do is one error on all, which names the rank and the phase.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from mrl import platform
from mrl.learner import Learner
from mrl.learner.memory import Level
from mrl.parallel import Agreement
from mrl.parallel.agreement import by_reason
from mrl.rollout import RELEASED_PARTS, MemoryPart

GIB = 1 << 30
AWAKE = RELEASED_PARTS["all"]


class OffloadError(RuntimeError):
    """Memory could not be given up, or taken back; raised on every rank."""


class _Together(Agreement[str]):
    def report(self, error: BaseException) -> str:
        return str(error)

    def verdict(self, what: str, reports: Mapping[int, str]) -> OffloadError:
        return OffloadError(f"{what} failed: {by_reason(reports)}")


@dataclass(frozen=True)
class Needs:
    """Of one phase.

    models: what must be on the device of each; one that is not named is left as it is
    engine: what the engines must have awake; None: as it is
    """

    models: Mapping[str, Level]
    engine: tuple[MemoryPart, ...] | None = None


class EngineMemory(Protocol):
    """The engines of a run. parts: what they can give up. Each call is collective; on every rank it returns whether an
    engine lacks its weights now: it gave them up, or lost them with its life, and has got no others yet."""

    @property
    def parts(self) -> tuple[MemoryPart, ...]: ...

    def release(self, parts: tuple[MemoryPart, ...]) -> bool: ...

    def resume(self, parts: tuple[MemoryPart, ...]) -> bool: ...


class MemoryOrder:
    """Who has which memory in which phase. All methods but `metrics` are collective.

    order: what the phases need, by name; one that it does not name needs nothing of it
    learners: by the names that the order has for them
    engines: None: their memory stays theirs
    """

    def __init__(
        self,
        order: Mapping[str, Needs] | None = None,
        learners: Mapping[str, Learner] | None = None,
        engines: EngineMemory | None = None,
    ) -> None:
        self.phase = ""
        self.must_push = False  # an engine lacks its weights: who pushes them says so here
        self._order, self._learners, self._engines = order or {}, learners or {}, engines
        self._asleep: tuple[MemoryPart, ...] = ()
        self._seconds, self._copied = 0.0, 0
        self._peaks: dict[str, int] = {}
        self._has_peak = False

    def begin(self, phase: str) -> None:
        """Moves to what the phase needs. What it does not need is given up first, on both sides."""
        self._note_peak()
        self.phase, began = phase, time.monotonic()
        needs = self._order.get(phase, Needs({}))
        here = {name: level for name, level in needs.models.items() if name in self._learners}
        moving = {name: level for name, level in here.items() if self._learners[name].memory.moves(level)}
        if moving:
            self._settle("giving up memory", lambda: self._give_up(moving))
        if self._engines is not None and needs.engine is not None:
            self._move_engines(self._engines, needs.engine)
        if moving:
            self._settle("taking memory back", lambda: self._bring(moving))
        self._seconds += time.monotonic() - began
        self._has_peak = platform.reset_peak_memory()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """`begin`, and afterwards again the phase that it was. After an error nothing is moved."""
        outer = self.phase
        self.begin(phase)
        yield
        self.begin(outer)

    def metrics(self) -> dict[str, float]:
        """Of this rank since the last call: GiB copied, either way; seconds of all moves, the engines' too; by phase
        the peak of tensors on the GPU (peak_gib) or, on a CPU, of the process' memory (resident_gib)."""
        self._note_peak()
        copied = sum(learner.memory.bytes_copied for learner in self._learners.values())
        kind = "peak_gib" if platform.gpu_count() else "resident_gib"
        found = {f"memory/{kind}/{phase}": peak / GIB for phase, peak in self._peaks.items()}
        moves = self._engines is not None and bool(self._engines.parts)
        if moves or any(learner.memory.offload != "none" for learner in self._learners.values()):
            found["memory/offloaded_gib"] = (copied - self._copied) / GIB
            found["memory/offload_s"] = self._seconds
        self._copied, self._seconds, self._peaks = copied, 0.0, {}
        return found

    def _give_up(self, levels: Mapping[str, Level]) -> None:
        for name, level in levels.items():
            with _named(name):
                self._learners[name].memory.give_up(level)
        platform.release_cached_memory()

    def _bring(self, levels: Mapping[str, Level]) -> None:
        for name, level in levels.items():
            with _named(name):
                self._learners[name].memory.bring(level)

    def _move_engines(self, engines: EngineMemory, awake: tuple[MemoryPart, ...]) -> None:
        asleep = tuple(part for part in engines.parts if part not in awake)
        release = tuple(part for part in asleep if part not in self._asleep)
        resume = tuple(part for part in self._asleep if part not in asleep)
        if release:
            self.must_push = engines.release(release)
        if resume:
            self.must_push = engines.resume(resume)
        self._asleep = asleep

    def _settle(self, what: str, action: Callable[[], None]) -> None:
        _TOGETHER.each(f"{what} before {self.phase!r}", action)

    def _note_peak(self) -> None:
        if self.phase and self._has_peak:
            self._peaks[self.phase] = max(platform.peak_memory_bytes(), self._peaks.get(self.phase, 0))


def put_away(name: str, learner: Learner) -> None:
    """Of a model that has just been built, all that its `offload` lets go, so that the next one finds room. Collective.
    Raises OffloadError."""

    def give_up() -> None:
        with _named(name):
            learner.memory.give_up("nothing")
        platform.release_cached_memory()

    if learner.memory.moves("nothing"):
        _TOGETHER.each("giving up memory after the building", give_up)


@contextlib.contextmanager
def _named(model: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise OffloadError(f"{model}: {type(error).__name__}: {error}") from error


_TOGETHER = _Together()
