"""Exception by which a signal ends a process. Standard library only."""

from __future__ import annotations


class Stopped(SystemExit):
    """Raised by a signal, to end this process with this exit code; a user's `sys.exit` is a plain SystemExit."""
