"""Entry point of `mrl` and `python -m mrl`: sets the signal handling before a run, then runs the command."""

import os
import signal
import sys


def main() -> int:
    """Runs the command of this process's command line; returns its exit code."""
    if sys.argv[1:2] == ["train"]:
        _listen()
    try:
        from mrl.cli import main as run
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return run()


def _listen() -> None:
    # ports.is_a_rank, without the imports of ports. Nothing to close yet; the launcher reports the end
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return
    from mrl.resilience import preemption

    preemption.exit_as_resumable()


if __name__ == "__main__":
    sys.exit(main())
