"""Communication with a program: writes its input, reads its output, and stops waiting at its limits."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import IO

CHUNK = 1 << 16
Talk = Generator[bytes, bytes, None]  # yields input for the program; each is answered by its next line


@dataclass
class WatchedProgram:
    how: str = ""
    ready: bytes = b""  # "1": the program began to run; more: why it could not; nothing: the sandbox never stood
    output: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})

    def text(self, name: str) -> str:
        return self.output[name].decode(errors="replace")


class _Input:
    """The program's stdin: `text`, then end of file; with `talk` a reply to each printed line, until that ends."""

    def __init__(self, pipe: IO[bytes], text: bytes, talk: Talk | None) -> None:
        self.pipe, self.pending, self.talk = pipe, text, talk
        self.heard = 0  # bytes of stdout that were answered
        self.waits = False  # for the pipe to take more
        os.set_blocking(pipe.fileno(), False)

    def write(self) -> None:
        try:
            self.pending = self.pending[os.write(self.pipe.fileno(), self.pending[:CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it does not read any more
            self.pending = b""

    def hear(self, stdout: bytearray) -> bool:
        """Replies to new lines. Returns False when `talk` has ended."""
        while self.talk is not None and (end := stdout.find(b"\n", self.heard)) >= 0:
            line, self.heard = bytes(stdout[self.heard : end]), end + 1
            try:
                self.pending += self.talk.send(line)
            except StopIteration:
                return False
        return True

    def settle(self, selector: selectors.BaseSelector) -> None:
        """Waits for the pipe if there is more to write; closes it if there never will be."""
        if self.waits != bool(self.pending):
            self.waits = bool(self.pending)
            if self.waits:
                selector.register(self.pipe, selectors.EVENT_WRITE, "stdin")
            else:
                selector.unregister(self.pipe)
        if self.talk is None and not self.pending:
            self.pipe.close()


def watch(
    process: subprocess.Popen[bytes], ready: int, text: bytes, talk: Talk | None, limits: tuple[float, float, int]
) -> WatchedProgram:
    """Watches until the process or `talk` has ended, or a limit is exceeded; does not kill the process.

    `limits`: seconds for the start, seconds for the program, bytes of output. The program's start closes the pipe
    `ready` (see `enter`): its seconds count from there.
    """
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    pipes = {"stdout": process.stdout, "stderr": process.stderr}
    start_s, wall_s, max_output = limits
    found, deadline = WatchedProgram(), time.monotonic() + start_s
    given = _Input(process.stdin, text, talk)
    ended = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            files: dict[str, IO[bytes] | int] = {**pipes, "ready": ready, "ended": ended}
            for name, file in files.items():
                selector.register(file, selectors.EVENT_READ, name)
            while not found.how:
                given.settle(selector)
                events = selector.select(max(0.0, deadline - time.monotonic()))
                names = {key.data for key, _ in events}
                if "stdin" in names:
                    given.write()
                if "ready" in names:
                    said = os.read(ready, CHUNK)
                    if said:
                        found.ready += said
                    else:
                        selector.unregister(ready)
                        deadline = time.monotonic() + wall_s
                for name in names & found.output.keys():
                    data = os.read(pipes[name].fileno(), CHUNK)
                    found.output[name] += data
                    if not data:
                        selector.unregister(pipes[name])
                if sum(map(len, found.output.values())) > max_output:
                    found.how = "too much output"
                elif not given.hear(found.output["stdout"]):
                    found.how = "all said"
                elif "ended" in names and names <= {"ended", "stdin"}:  # nothing is left to read
                    found.how = _how(process.wait())
                elif time.monotonic() >= deadline:
                    found.how = "time out"
    finally:
        os.close(ended)
    return found


def _how(code: int) -> str:
    """Returns the end of a process by its exit code; bwrap reports a signal as a shell does."""
    number = -code if code < 0 else code - 128
    if number in {int(s) for s in signal.Signals}:
        return f"signal {signal.Signals(number).name}"
    return f"exit code {code}"
