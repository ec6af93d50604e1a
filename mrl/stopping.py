"""Exception by which a signal ends a process. Standard library only."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(SystemExit):
    """Raised by a signal, to end this process with this exit code; a user's `sys.exit` is a plain SystemExit."""


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Same as asyncio.run, but prints no "Task exception was never retrieved" for tasks that a signal ends."""
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(_report)
        return runner.run(coroutine)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not isinstance(context.get("exception"), Stopped):
        loop.default_exception_handler(context)
