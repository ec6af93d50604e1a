"""The exception by which a signal ends a process. Standard library only."""

from __future__ import annotations


class Stopped(SystemExit):
    """A signal has told this process to end with this exit code; a user's `sys.exit` is a plain SystemExit."""
