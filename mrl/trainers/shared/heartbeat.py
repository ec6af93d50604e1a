"""Heartbeat channel between rank 0 and the waiting ranks; detects and names a rank that stops or hangs."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mrl.parallel import messages, rank

EVERY, ANSWER = 0.1, 0.7  # shares of timeout_s: interval of rank 0's heartbeats, time for the others to answer one


class LostRankError(RuntimeError):
    """Another rank sends no heartbeat."""


@dataclass(frozen=True)
class _Heartbeat:
    """Heartbeat: rank 0 is at work."""


class Activity:
    """Time of rank 0's last progress: a response, a score, an engine. Any thread may note it.

    most_s: maximum seconds without progress
    """

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self._last = time.monotonic()

    def note(self, *_: object) -> None:
        """Notes progress now."""
        self._last = time.monotonic()

    def left_s(self, since: float) -> float:
        """Seconds left for a caller that has waited since time.monotonic() was `since`."""
        return max(since, self._last) + self.most_s - time.monotonic()


class Heartbeat:
    """Heartbeat channel. Construction is collective. `group`: the control group of all ranks (gloo).

    timeout_s: seconds within which a stopped rank is detected
    activity: progress of rank 0, which may spend any time on one task while it makes progress
    """

    def __init__(self, timeout_s: float, activity: Activity) -> None:
        self._timeout_s, self._activity = timeout_s, activity
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.lock = threading.RLock()  # serializes rank 0's threads on the channel
        self._problem: Exception | None = None

    def send(self, message: Any) -> None:
        """Sends a message from rank 0 to the ranks that call `receive`. Raises LostRankError."""
        with self.lock:
            self._barrier(ANSWER * self._timeout_s)
            messages.send(message, self.group)

    def receive(self) -> Any:
        """Receives rank 0's next message. Raises LostRankError."""
        message: Any = _Heartbeat()
        while isinstance(message, _Heartbeat):
            self._barrier(self._timeout_s)
            message = messages.receive(self.group)
        return message

    @contextmanager
    def sent_while_working(self, what: str) -> Iterator[None]:
        """Sends heartbeats while rank 0 works alone in its main thread and the others call `receive`.

        Raises LostRankError, in the middle of the work, as soon as a rank is lost.
        """
        if dist.get_world_size() == 1:
            yield
            return
        done = threading.Event()
        thread = threading.Thread(target=self._send_heartbeats, args=(what, done), daemon=True, name="heartbeat")
        thread.start()
        try:
            yield
            done.set()
            thread.join()
        except BaseException:
            done.set()
            if self._problem is not None:
                raise self._problem from None
            raise
        if self._problem is not None:
            raise self._problem

    def _send_heartbeats(self, what: str, done: threading.Event) -> None:
        began = time.monotonic()
        try:
            while not done.wait(EVERY * self._timeout_s):
                if self._activity.left_s(began) < 0:
                    most_s = self._activity.most_s
                    raise LostRankError(
                        f"{what}: rank 0 has made no progress for {most_s:.0f} s, longer than any part of it takes"
                    )
                self.send(_Heartbeat())
        except Exception as error:
            self._problem = error
            if not done.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _barrier(self, limit_s: float) -> None:
        began = time.monotonic()
        try:
            dist.monitored_barrier(self.group, timedelta(seconds=limit_s), wait_all_ranks=True)
        except RuntimeError as error:
            if time.monotonic() - began < limit_s:
                raise  # the rank that closed the connection reports the reason
            silent = re.findall(r"\d+", str(error).partition(" failed to pass")[0].rpartition("]: ")[2])
            who = "rank 0" if rank() else " and ".join(f"rank {number}" for number in silent)
            said = f"no heartbeat from {who} for {limit_s:g} s (run.timeout_s = {self._timeout_s:g})"
            raise LostRankError(f"{said}: it has stopped or hangs; see the end of its log") from None
