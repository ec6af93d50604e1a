"""Worker pools: a session that hangs or crashes affects only itself, and its process is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from mrl.workers.pool import Session, SessionFault, WorkerPool

LONG_S, SHORT_S = 60.0, 0.5


class ToyError(Exception):
    pass


Open = Callable[..., WorkerPool]


@pytest.fixture
def open_pool() -> Iterator[Open]:
    with ExitStack() as stack:

        def made(size: int = 1, is_shared: bool = False, **setup: Any) -> WorkerPool:
            module, word = "tests.helpers.toy_worker", {"word": "hello", **setup}
            pool = WorkerPool("toy", module, word, size, what="the toy", error=ToyError, is_shared=is_shared)
            stack.callback(pool.close)
            return pool

        yield made


def run(pool: WorkerPool, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return pool.loop.submit(work()).result(LONG_S)


async def ask(session: Session, message: bytes, timeout_s: float = LONG_S) -> dict[str, Any]:
    return await session.exchange(message, timeout_s, "is late")


def call(pool: WorkerPool, message: bytes, timeout_s: float = LONG_S) -> dict[str, Any]:
    async def one() -> dict[str, Any]:
        async with pool.session() as session:
            return await ask(session, message, timeout_s)

    found: dict[str, Any] = run(pool, one)
    return found


def test_messages_of_any_size_are_answered(open_pool: Open) -> None:
    pool = open_pool()
    for size in (1, 10_000_000):
        answer = call(pool, b"x" * size)
        assert (answer["word"], answer["bytes"]) == ("hello", size)


@pytest.mark.parametrize(
    ("message", "fault"), [(b"hang", "is late"), (b"exit", r"ended its process \(exit code 3\)"), (b"garbage", "ended")]
)
def test_a_process_that_hangs_or_ends_is_replaced(open_pool: Open, message: bytes, fault: str) -> None:
    pool = open_pool()
    before = call(pool, b"x")["pid"]
    with pytest.raises(SessionFault, match=fault) as found:
        call(pool, message, SHORT_S if message == b"hang" else LONG_S)
    assert found.value.is_own
    assert call(pool, b"x")["pid"] != before


def test_a_process_that_died_between_calls_costs_none(open_pool: Open) -> None:
    pool = open_pool()
    before = call(pool, b"x")["pid"]
    os.kill(before, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # the pool may have reaped it first
        os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    assert call(pool, b"x")["pid"] != before


def test_calls_wait_for_a_free_process_and_start_in_order(open_pool: Open) -> None:
    pool, order = open_pool(size=2), list[int]()

    async def one(number: int) -> int:
        async with pool.session() as session:
            order.append(number)
            pid: int = (await ask(session, b"x"))["pid"]
            assert sum(len(worker.sessions) for worker in pool.workers) <= 2
            return pid

    async def every() -> list[int]:
        return await asyncio.gather(*map(one, range(20)))

    assert len({*run(pool, every)}) == 2 and order == list(range(20))


def test_a_silent_session_of_a_shared_process_ends_alone(open_pool: Open) -> None:
    """A silent session of a shared process ends alone. The process still answers, so its other session continues; new
    sessions get another process."""
    pool = open_pool(is_shared=True)

    async def both() -> tuple[int, int, int]:
        async with pool.session() as other:
            before = (await ask(other, b"x"))["pid"]
            with pytest.raises(SessionFault, match="is late"):
                async with pool.session() as session:
                    await ask(session, b"silent", SHORT_S)
            async with pool.session() as session:
                new = (await ask(session, b"x"))["pid"]
            return before, (await ask(other, b"x"))["pid"], new

    before, after, new = run(pool, both)
    assert before == after != new


def test_a_session_that_blocks_its_process_is_the_only_one_at_fault(open_pool: Open) -> None:
    pool = open_pool(is_shared=True)

    async def both() -> SessionFault:
        async with pool.session() as other, pool.session() as session:
            waiting = asyncio.ensure_future(ask(other, b"silent"))
            await asyncio.sleep(0)
            with pytest.raises(SessionFault, match="is late") as found:
                await ask(session, b"hang", SHORT_S)
            assert found.value.is_own
            with pytest.raises(SessionFault, match="shared its process with a program that hangs") as found:
                await waiting
            return found.value

    assert not run(pool, both).is_own


def test_sessions_that_wait_when_their_process_ends_may_all_be_the_cause(open_pool: Open) -> None:
    pool = open_pool(is_shared=True)

    async def three() -> list[bool]:
        async with pool.session() as idle, pool.session() as other, pool.session() as session:
            await ask(idle, b"x")
            waiting = asyncio.ensure_future(ask(other, b"silent"))
            await asyncio.sleep(0)
            found = []
            for each in (ask(session, b"exit"), waiting, ask(idle, b"x")):
                with pytest.raises(SessionFault, match="exit code 3") as fault:
                    await each
                found.append(fault.value.is_own)
            return found

    assert run(pool, three) == [True, True, False]


def test_what_does_not_load_is_an_error_at_once(open_pool: Open) -> None:
    with pytest.raises(ToyError, match="^no such thing$"):
        open_pool(size=3, wrong="no such thing")
    with pytest.raises(ToyError, match=r"^the toy: a worker died while loading it \(exit code 4\)$"):
        open_pool(size=3, dies=True)


def test_a_closed_pool_has_no_processes_and_no_sessions(open_pool: Open) -> None:
    pool = open_pool(size=2)
    waiting = [pool.loop.submit(each) for each in (wait_silently(pool), wait_silently(pool), wait_silently(pool))]
    pool.close()
    assert all(worker.process.returncode == -signal.SIGKILL for worker in pool.workers)
    for each in waiting:
        with pytest.raises(ToyError, match="the worker pool is closed"):
            each.result(0)


async def wait_silently(pool: WorkerPool) -> None:
    async with pool.session() as session:
        await ask(session, b"silent")
