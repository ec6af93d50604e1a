"""Device memory by the phases of a step: models and engines move only as a table says.

All ranks move at the same point. A failure on one rank raises on all of them and names the rank and the phase.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from mrl import platform
from mrl.inference.protocol import RELEASED_PARTS, MemoryPart
from mrl.learner import Learner
from mrl.learner.memory import Level
from mrl.parallel import CollectiveErrorCheck
from mrl.parallel.error_check import by_reason

GIB = 1 << 30
AWAKE = RELEASED_PARTS["all"]


class OffloadError(RuntimeError):
    """Memory could not be offloaded or reloaded; raised on every rank."""


class _MemoryErrorCheck(CollectiveErrorCheck[str]):
    def report(self, error: BaseException) -> str:
        return str(error)

    def combined_error(self, what: str, reports: Mapping[int, str]) -> OffloadError:
        return OffloadError(f"{what} failed: {by_reason(reports)}")


@dataclass(frozen=True)
class PhaseMemory:
    """Memory needs of one phase.

    models: level of each model on the device; a model that is not named stays as it is
    engine: memory parts that the engines keep awake; None: as they are
    """

    models: Mapping[str, Level]
    engine: tuple[MemoryPart, ...] | None = None


class EngineMemory(Protocol):
    """The engines of a run. parts: memory that engines can release.

    Each call is collective. On every rank it returns True if an engine lacks its weights, because it released them or
    was restarted, and has not received new ones.
    """

    @property
    def parts(self) -> tuple[MemoryPart, ...]: ...

    def release(self, parts: tuple[MemoryPart, ...]) -> bool: ...

    def resume(self, parts: tuple[MemoryPart, ...]) -> bool: ...


class PhaseMemoryManager:
    """Moves the memory of models and engines at each phase. All methods but `metrics` are collective.

    order: needs by phase; a phase that is not named moves nothing
    learners: by their names in the order
    engines: None: their memory is never moved
    """

    def __init__(
        self,
        order: Mapping[str, PhaseMemory] | None = None,
        learners: Mapping[str, Learner] | None = None,
        engines: EngineMemory | None = None,
    ) -> None:
        self.phase = ""
        self.needs_weight_sync = False  # an engine lacks its weights; the weight sync sets this
        self._order, self._learners, self._engines = order or {}, learners or {}, engines
        self._asleep: tuple[MemoryPart, ...] = ()
        self._seconds, self._copied = 0.0, 0
        self._peaks: dict[str, int] = {}
        self._has_peak = False

    def begin(self, phase: str) -> None:
        """Moves memory to the needs of the phase. Models and engines offload before anything is reloaded."""
        self._note_peak()
        self.phase, began = phase, time.monotonic()
        needs = self._order.get(phase, PhaseMemory({}))
        here = {name: level for name, level in needs.models.items() if name in self._learners}
        moving = {name: level for name, level in here.items() if self._learners[name].memory.moves(level)}
        if moving:
            self._settle("offloading", lambda: self._offload(moving))
        if self._engines is not None and needs.engine is not None:
            self._move_engines(self._engines, needs.engine)
        if moving:
            self._settle("reloading", lambda: self._reload(moving))
        self._seconds += time.monotonic() - began
        self._has_peak = platform.reset_peak_memory()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Begins the phase, and returns to the previous phase afterwards. After an error nothing is moved."""
        outer = self.phase
        self.begin(phase)
        yield
        self.begin(outer)

    def metrics(self) -> dict[str, float]:
        """Returns this rank's memory metrics since the last call: GiB copied in either direction, seconds of all moves
        (the engines' too), and by phase the peak of GPU tensors (peak_gib) or, on a CPU, of the process (resident_gib).
        """
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

    def _offload(self, levels: Mapping[str, Level]) -> None:
        for name, level in levels.items():
            with _named(name):
                self._learners[name].memory.offload_to(level)
        platform.release_cached_memory()

    def _reload(self, levels: Mapping[str, Level]) -> None:
        for name, level in levels.items():
            with _named(name):
                self._learners[name].memory.reload_to(level)

    def _move_engines(self, engines: EngineMemory, awake: tuple[MemoryPart, ...]) -> None:
        asleep = tuple(part for part in engines.parts if part not in awake)
        release = tuple(part for part in asleep if part not in self._asleep)
        resume = tuple(part for part in self._asleep if part not in asleep)
        if release:
            self.needs_weight_sync = engines.release(release)
        if resume:
            self.needs_weight_sync = engines.resume(resume)
        self._asleep = asleep

    def _settle(self, what: str, action: Callable[[], None]) -> None:
        _ERROR_CHECK.each(f"{what} before {self.phase!r}", action)

    def _note_peak(self) -> None:
        if self.phase and self._has_peak:
            self._peaks[self.phase] = max(platform.peak_memory_bytes(), self._peaks.get(self.phase, 0))


def offload_new_model(name: str, learner: Learner) -> None:
    """Offloads what `offload` allows of a model that has just been built, to make room for the next one. Collective.
    Raises OffloadError."""

    def offload() -> None:
        with _named(name):
            learner.memory.offload_to("nothing")
        platform.release_cached_memory()

    if learner.memory.moves("nothing"):
        _ERROR_CHECK.each("offloading after construction", offload)


@contextlib.contextmanager
def _named(model: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise OffloadError(f"{model}: {type(error).__name__}: {error}") from error


_ERROR_CHECK = _MemoryErrorCheck()
