"""Coroutines that a signal ends."""

from __future__ import annotations

import asyncio
import gc

import pytest

from mrl.stopping import Stopped, run_coroutine


async def fail(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


def test_a_task_that_a_signal_ended_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        task = asyncio.create_task(fail(Stopped(130)))
        try:
            await asyncio.sleep(60)
        finally:
            await task  # raises Stopped again while asyncio cancels the rest

    with pytest.raises(Stopped):
        run_coroutine(main())
    gc.collect()
    assert not caplog.records


def test_other_errors_of_tasks_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> int:
        asyncio.create_task(fail(RuntimeError("broken")))  # noqa: RUF006
        await asyncio.sleep(0.01)
        return 1

    assert run_coroutine(main()) == 1
    gc.collect()
    assert "RuntimeError: broken" in caplog.text
