"""A dispatcher on a simulated clock, in one thread: no test waits, and the order of events is known."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from itertools import count
from types import SimpleNamespace
from typing import Any

from mrl.core import Request, Sample, SamplingParams
from mrl.inference.load import Load, Meter


class SimulatedDispatcher:
    """The simulated dispatcher.

    now: simulated time in seconds; capacity: requests that can run at once; busy_s: total seconds of requests that ran;
    sent: number of running requests; interruptions: times of interruptions
    """

    is_restarting = False

    def __init__(self, capacity: int = 1 << 20) -> None:
        self.loop, self.now, self.busy_s = asyncio.new_event_loop(), 0.0, 0.0
        self.awaiting_weights: tuple[str, ...] = ()
        self._sleeping: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers, self._slots = count(), asyncio.Semaphore(capacity)
        self.sent, self._gate, self.interruptions = 0, asyncio.Event(), list[float]()
        self._gate.set()

    def submit(self, program: Coroutine[Any, Any, Any]) -> Future[Any]:
        done: Future[Any] = Future()

        def tell(task: asyncio.Task[Any]) -> None:
            if task.cancelled():
                done.cancel()
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        self.loop.create_task(program).add_done_callback(tell)
        return done

    async def run_for(self, seconds: float, started: Callable[[], object] = lambda: None) -> None:
        """Runs a request that takes `seconds`, once there is capacity. started: called when it starts or continues"""
        async with self._slots:
            while seconds > 1e-9:
                await self._gate.wait()
                started()
                began, woken = self.now, self.loop.create_future()
                heapq.heappush(self._sleeping, (began + seconds, next(self._numbers), woken))
                self.sent += 1
                await woken
                self.sent -= 1
                self.busy_s += self.now - began
                seconds -= self.now - began

    def pause(self, *, interrupt: bool) -> Future[None]:
        self._gate.clear()
        if interrupt:
            self.interruptions.append(self.now)
            for _, _, woken in self._sleeping:
                if not woken.done():
                    woken.set_result(None)
            self._sleeping = []
            self._settle()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def resume(self) -> None:
        self._gate.set()

    def serve(
        self,
        until: Callable[[], bool],
        give_weights: Callable[[str], None] | None = None,
        left_s: Callable[[], float] = lambda: 1.0,
        late: Callable[[], str] = lambda: "",
    ) -> None:
        self._settle()
        while not until():
            if not self.step() and not self._has_other_threads(until):
                raise RuntimeError(late())

    def _has_other_threads(self, until: Callable[[], bool]) -> bool:
        """Waits briefly for work in other threads. Returns True if there was any."""
        for _ in range(100):
            self.loop.run_until_complete(asyncio.sleep(0.001))
            if self._sleeping or until():
                return True
        return False

    def step(self) -> bool:
        """Advances the clock to the end of the next request. Returns False if no request runs."""
        while self._sleeping:
            at, _, woken = heapq.heappop(self._sleeping)
            if not woken.done():
                self.now = max(self.now, at)
                woken.set_result(None)
                self._settle()
                return True
        return False

    def pass_s(self, seconds: float) -> None:
        """Advances the clock by `seconds`, as a training step does."""
        end = self.now + seconds
        self._settle()
        while self._sleeping and self._sleeping[0][0] <= end:
            self.step()
        self.now = end

    def _settle(self) -> None:
        """Runs everything that is ready."""
        for _ in range(12):
            self.loop.run_until_complete(asyncio.sleep(0))

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self._settle()
        self.loop.close()


class SimulatedEngine:
    """The methods of an engine that `Generator` uses; `answer` makes a request's sample. asked: requests, in order"""

    def __init__(self, answer: Callable[[Request, SamplingParams], Sample]) -> None:
        self.asked: list[tuple[Request, SamplingParams]] = []
        self.pool = SimpleNamespace(restarts=SimpleNamespace(give_weights=lambda url: None))
        self.dispatcher = SimulatedDispatcher()

        async def generate(request: Request, how: Any, group: object = None) -> Sample:
            self.asked.append((request, how.sampling))
            return answer(request, how.sampling)

        async def in_main(work: Callable[[], Any]) -> Any:
            return work()

        for name, function in {"generate": generate, "in_main": in_main, "post": lambda work: work()}.items():
            setattr(self.dispatcher, name, function)

    def generation(self, sampling: SamplingParams, **more: bool) -> Any:
        return SimpleNamespace(sampling=sampling)

    def run(self, program: Coroutine[Any, Any, Any]) -> Any:
        done = self.dispatcher.submit(program)
        self.dispatcher.serve(done.done)
        return done.result()

    def discard(self, samples: list[Sample]) -> None:
        pass

    def take_loads(self) -> tuple[dict[str, Load], Load]:
        return {}, Meter().take()
