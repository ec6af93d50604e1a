"""The event loop of worker pools: no work is lost or left running."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from mrl.workers.event_loop import EventLoopThread


class ClosedError(Exception):
    pass


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    made = EventLoopThread("loop-of-test", ClosedError("it is closed"))
    yield made
    made.close()


def test_results_and_errors_come_back(loop: EventLoopThread) -> None:
    async def divide(by: int) -> float:
        await asyncio.sleep(0)
        return 1 / by

    assert loop.submit(divide(2)).result(60) == 0.5
    with pytest.raises(ZeroDivisionError):
        loop.submit(divide(0)).result(60)


def test_close_frees_whoever_waits_and_lets_work_clean_up(loop: EventLoopThread) -> None:
    cleaned = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(threading.current_thread().name)

    running = [loop.submit(wait()) for _ in range(3)]
    loop.close()
    for each in running:
        with pytest.raises(ClosedError):
            each.result(0)
    assert cleaned == ["loop-of-test"] * 3
    assert "loop-of-test" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ClosedError):
        loop.submit(wait())


def test_work_that_nothing_else_refers_to_is_not_collected(loop: EventLoopThread) -> None:
    cancelled = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)

    loop.submit(wait())
    loop.submit(asyncio.sleep(0)).result(60)
    gc.collect()
    loop.close()
    assert cancelled == [True]


def test_work_that_its_caller_cancels_ends(loop: EventLoopThread) -> None:
    ended = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = loop.submit(wait())
    loop.submit(asyncio.sleep(0)).result(60)
    running.cancel()
    assert ended.wait(60)
