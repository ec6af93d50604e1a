"""Waits for a program, reads what it says, and stops waiting at its limits."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass, field

CHUNK = 1 << 16


@dataclass
class Watched:
    how: str = ""
    ready: bytes = b""  # "1": the program began to run; more: why it could not; nothing: the sandbox never stood
    output: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})

    @property
    def stdout(self) -> bytes:
        return bytes(self.output["stdout"])

    @property
    def stderr(self) -> bytes:
        return bytes(self.output["stderr"])


def watch(process: subprocess.Popen[bytes], ready: int, start_s: float, wall_s: float, max_output: int) -> Watched:
    """Until the process has ended, or is past `start_s` + `wall_s` seconds or `max_output` bytes; it is not killed.

    The pipe `ready` (see `enter`) is closed by the start of the program: its `wall_s` count from there.
    """
    assert process.stdout is not None and process.stderr is not None
    found, deadline = Watched(), time.monotonic() + start_s
    ended = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            for file, name in ((ready, "ready"), (process.stdout, "stdout"), (process.stderr, "stderr")):
                selector.register(file, selectors.EVENT_READ, name)
            selector.register(ended, selectors.EVENT_READ, "ended")
            while not found.how:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                names = {key.data for key, _ in events}
                if "ready" in names:
                    said = os.read(ready, CHUNK)
                    if said:
                        found.ready += said
                    else:
                        selector.unregister(ready)
                        deadline = time.monotonic() + wall_s
                for key, _ in events:
                    if key.data in found.output and not _read(key.fd, found.output[key.data]):
                        selector.unregister(key.fileobj)
                if sum(map(len, found.output.values())) > max_output:
                    found.how = "too much output"
                elif "ended" in names and names <= {"ended"}:  # nothing is left to read
                    found.how = _how(process.wait())
                elif time.monotonic() >= deadline:
                    found.how = "time out"
    finally:
        os.close(ended)
    return found


def _read(fd: int, into: bytearray) -> bool:
    data = os.read(fd, CHUNK)
    into += data
    return bool(data)


def _how(code: int) -> str:
    """bwrap reports a signal as a shell does."""
    number = -code if code < 0 else code - 128
    if number in {int(s) for s in signal.Signals}:
        return f"signal {signal.Signals(number).name}"
    return f"exit code {code}"
