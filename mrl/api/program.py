"""Runs a program for a script or a notebook: shows its output there, and passes signals on to it."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

from mrl.launcher.signals import collect_signals, start_program

POLL_S = 0.1


class Copied:
    """Output of a program that is also written to a stream of this process."""

    def __init__(self, target: IO[str]) -> None:
        self.text = ""
        self._target, self._decoder = target, codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes) -> None:
        text = self._decoder.decode(data)
        self.text += text
        with contextlib.suppress(OSError):  # no reader left
            self._target.write(text)
            self._target.flush()


def run_program(command: Sequence[str]) -> tuple[int, str]:
    """Returns the exit code of a program and its stderr.

    In the main thread, stopping signals go to the program. It is killed if this process ends.
    """
    signals: contextlib.AbstractContextManager[list[int]] = contextlib.nullcontext([])
    if threading.current_thread() is threading.main_thread():  # which alone may handle them
        signals = collect_signals()
    with signals as received, selectors.DefaultSelector() as pipes:
        out = None if sys.stdout is sys.__stdout__ else subprocess.PIPE  # a notebook's is no file
        process = start_program(command, stdout=out, stderr=subprocess.PIPE)
        assert process.stderr is not None
        errors = Copied(sys.stderr)
        pipes.register(process.stderr, selectors.EVENT_READ, errors)
        if process.stdout is not None:
            pipes.register(process.stdout, selectors.EVENT_READ, Copied(sys.stdout))
        passed_on = 0
        with process:  # closes the pipes
            try:
                while process.poll() is None:
                    copy_output(pipes, POLL_S)
                    for number in received[passed_on:]:
                        process.send_signal(number)
                        passed_on += 1
                copy_output(pipes, 0.0)  # not to the end of the pipes: an engine that ends later may keep them open
            except BaseException:  # of a stream of this process
                process.kill()
                raise
    return process.returncode, errors.text


def copy_output(selector: selectors.BaseSelector, timeout_s: float) -> None:
    """Copies all that is in the pipes, after a wait of up to `timeout_s` for the first of it."""
    while ready := selector.select(timeout_s):
        timeout_s = 0.0
        for key, _ in ready:
            if data := os.read(key.fd, 1 << 16):
                key.data.add(data)
            else:
                selector.unregister(key.fileobj)
