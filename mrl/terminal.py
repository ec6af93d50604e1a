"""Copies rank 0's output to the terminal and to its log, through a pseudo-terminal if there is a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import selectors
import signal
import struct
import sys
import termios
import time
from collections import deque
from pathlib import Path
from types import FrameType, TracebackType
from typing import BinaryIO

_PIECES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[^\[]|\r|\n|[^\x1b\r\n]+")
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-9;?]*)?\Z")
_CHUNK = 1 << 16


class Terminal:
    """Copies rank 0's output from `for_rank` to stdout unchanged, and to the log in its final form."""

    def __init__(self, log: Path) -> None:
        self._is_terminal = sys.stdout.isatty()
        if self._is_terminal:
            self._source, self.for_rank = pty.openpty()
            attributes = termios.tcgetattr(self.for_rank)
            attributes[1] &= ~termios.OPOST
            termios.tcsetattr(self.for_rank, termios.TCSANOW, attributes)
            self._resize()
        else:
            self._source, self.for_rank = os.pipe()
        os.set_blocking(self._source, False)
        self._log_path, self._log_is_whole = log, True
        self._rank_side_open = True
        self._is_in_a_line = False  # the last copied output had no newline

    def __enter__(self) -> Terminal:
        self._log = TidyLog(self._log_path.open("ab"))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._source, selectors.EVENT_READ)
        if self._is_terminal:
            self._previous = signal.signal(signal.SIGWINCH, self._resize)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_terminal:
            signal.signal(signal.SIGWINCH, self._previous)
        self.rank_started()
        self._selector.close()
        os.close(self._source)
        with contextlib.suppress(OSError):  # the log may be unwritable
            self._log.close()

    def rank_started(self) -> None:
        """Closes this process's copy of the rank's side, so that the rank's end closes the stream."""
        if self._rank_side_open:
            os.close(self.for_rank)
            self._rank_side_open = False

    def pump(self, timeout_s: float) -> None:
        """Copies available output; waits up to `timeout_s` for it."""
        if self._selector.get_map():
            if self._selector.select(timeout_s):
                self._copy()
        else:
            time.sleep(timeout_s)

    def drain(self) -> None:
        """Copies the remaining output, without waiting for processes that still hold the other side."""
        while self._selector.get_map() and self._copy():
            pass

    def say(self, text: str, prefix: str = "mrl: ") -> None:
        """Prints a line of the launcher, on a new line even if a rank died within one."""
        end, self._is_in_a_line = "\n" * self._is_in_a_line, False
        with contextlib.suppress(OSError):
            print(f"{end}{prefix}{text}", file=sys.stderr, flush=True)

    def log(self, text: str) -> None:
        """Writes lines to the log alone."""
        self._write(text.encode())

    def _write(self, data: bytes) -> None:
        """Writes to the log while that is possible; the run does not depend on it."""
        if self._log_is_whole:
            try:
                self._log.write(data)
            except OSError as error:
                self._log_is_whole = False
                self.say(f"{self._log_path} cannot be written any more ({error.strerror}): output goes to the terminal")

    def _copy(self) -> bool:
        try:
            data = os.read(self._source, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # a pseudo-terminal whose other side is closed
            data = b""
        if not data:
            self._selector.unregister(self._source)
            return False
        self._write(data)
        self._is_in_a_line = data[-1:] != b"\n"
        with contextlib.suppress(OSError):  # no reader left; the log still gets it
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        return True

    def _resize(self, number: int = 0, frame: FrameType | None = None) -> None:
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        fcntl.ioctl(self._source, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


class TidyLog:
    """File with a terminal's final content: redrawn lines are replaced, colours removed.

    Live displays move the cursor up and redraw; the last `REACH` lines of the file are then rewritten.
    """

    REACH = 200

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._starts: deque[int] = deque(maxlen=self.REACH)
        self._line = b""
        self._unfinished = b""
        self._redraw = False

    def write(self, data: bytes) -> None:
        data = self._unfinished + data
        match = _UNFINISHED.search(data)
        cut = match.start() if match else len(data)
        self._unfinished = data[cut:]
        for piece in _PIECES.findall(data[:cut]):
            self._piece(piece)
        self._file.flush()

    def _piece(self, piece: bytes) -> None:
        if piece == b"\n":
            self._starts.append(self._file.tell())
            self._file.write(self._line + b"\n")
            self._line, self._redraw = b"", False
        elif piece == b"\r":
            self._redraw = True
        elif piece.startswith(b"\x1b"):
            self._control(piece)
        else:
            self._line = piece if self._redraw else self._line + piece
            self._redraw = False

    def _control(self, piece: bytes) -> None:
        if piece.endswith(b"K"):
            self._line = b""
        elif piece.endswith(b"A"):
            for _ in range(min(int(piece[2:-1] or 1), len(self._starts))):
                self._file.truncate(self._starts.pop())
                self._file.seek(0, os.SEEK_END)
            self._line = b""

    def close(self) -> None:
        if self._line:
            self._piece(b"\n")
        self._file.close()
