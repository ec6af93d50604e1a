"""Reports a rank's current section to its watchers.

Under ft_launcher, the rank's monitor kills a rank that exceeds the section's timeout. For `mrl train`, which started
the launcher, the rank also writes the section to a file. Elsewhere a section does nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from mrl.config.schema import SectionTimeouts
from mrl.failure import LostContact
from mrl.resilience import ft_config
from mrl.resilience.protocol import RankStatus
from mrl.resilience.rank import log_dir

MONITOR_VARIABLE = "FT_RANK_MONITOR_IPC_SOCKET"  # set by ft_launcher in its ranks
_STACK_AT = 0.95  # share of a timeout after which a rank writes its stack to its log


class MonitorError(RuntimeError):
    """ft_launcher's timeouts differ from the configuration's."""


class _RankWatch:
    """Connection of this rank to its monitor and to the launcher."""

    def __init__(self, limits: dict[str, float], client: Any, directory: Path | None) -> None:
        self._limits, self._client, self._directory = limits, client, directory
        self._open: list[str] = []
        self._stacks: IO[str] | None = None
        if client is not None and directory is not None:
            self._stacks = (directory / f"rank_{os.environ['RANK']}.log").open("a")

    def enter(self, name: str) -> None:
        if self._client is not None:
            _call_monitor(lambda: self._client.start_section(name))
        self._open.append(name)
        self._write_status()

    def leave(self, name: str) -> None:
        self._open.remove(name)
        if self._client is not None:
            _call_monitor(lambda: self._client.end_section(name))
        self._write_status()

    def fail(self, name: str) -> None:
        """Leaves the section like `leave`, but keeps the file, which shows where the error arose."""
        self._open.remove(name)
        if self._client is not None:
            with contextlib.suppress(Exception):  # the monitor may be gone; the current error says more
                self._client.end_section(name)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._client is not None:
            self._client.shutdown_workload_monitoring()
        if self._directory is not None:
            RankStatus.of_this_rank(None, ended=True).write(self._directory)

    def _write_status(self) -> None:
        section = self._open[-1] if self._open else None
        if self._client is not None:
            limit = self._limits[section or "out_of_section"]
            faulthandler.dump_traceback_later(_STACK_AT * limit, file=self._stacks or sys.stderr)
        if self._directory is not None:
            RankStatus.of_this_rank(section).write(self._directory)


_watched: _RankWatch | None = None


@contextlib.contextmanager
def watch_rank(timeouts: SectionTimeouts, run_dir: Path) -> Iterator[Callable[[], None]]:
    """Watches the rank from here on, in section `setup` until the yielded function is called.

    Call it once the process group exists. A rank that leaves by an error stays recorded as one without an orderly end.
    Raises MonitorError, and writes ft_launcher's file to `run_dir`, if ft_launcher runs with other timeouts.
    """
    global _watched
    limits, directory = timeouts.model_dump(), log_dir()
    client = _client(timeouts, run_dir) if MONITOR_VARIABLE in os.environ else None
    if client is None and directory is None:
        yield lambda: None
        return
    _watched = watch = _RankWatch(limits, client, directory)
    watch.enter("setup")
    try:
        yield lambda: watch.leave("setup")
    except SystemExit:
        watch.close()
        raise
    else:
        watch.close()
    finally:
        _watched = None


@contextlib.contextmanager
def section(name: str) -> Iterator[None]:
    """Marks a part of the run, one of protocol.SECTIONS. Sections nest, each with its own timeout.

    Only the main thread is watched, which waits for the others.
    """
    watch = _watched
    if watch is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    watch.enter(name)
    try:
        yield
    except BaseException:
        watch.fail(name)
        raise
    watch.leave(name)


def _call_monitor(say: Callable[[], None]) -> None:
    """Runs `say`; raises LostContact if the monitor does not answer, since ft_launcher closes monitors before stopping
    ranks."""
    try:
        say()
    except Exception as error:
        raise LostContact(f"ft_launcher's monitor of this rank does not respond: {error}") from error


def _client(timeouts: SectionTimeouts, run_dir: Path) -> Any:
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    _call_monitor(client.init_workload_monitoring)
    there = {**client.section_timeouts.section, "out_of_section": client.section_timeouts.out_of_section}
    if there != (wanted := timeouts.model_dump()):
        raise MonitorError(
            f"ft_launcher has different timeouts from resilience.timeouts_s: {there} instead of {wanted}; "
            f"start it with --ft-cfg-path {ft_config.write(run_dir, timeouts)}"
        )
    return client
