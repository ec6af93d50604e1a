"""Calls that may never return, in monitored threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mrl import platform
from mrl.weights.errors import WeightError


class InBackground:
    """Call in its own thread, on this process' device. A thread whose call hangs is abandoned."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], None]) -> None:
        try:
            platform.use_device()
            call()
        except Exception as error:  # handed over by result()
            self._error = error.with_traceback(None)  # its frames would keep tensors and process groups alive

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        return self.done and self._error is not None

    def wait(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s`; returns True if the call is done."""
        self._thread.join(timeout_s)
        return self.done

    def result(self, timeout_s: float, what: str) -> None:
        """Raises the call's error, or WeightError if the call takes longer than `timeout_s`."""
        if not self.wait(timeout_s):
            raise WeightError(f"{what}: did not finish within {timeout_s:.0f} s")
        if self._error is not None:
            raise self._error
