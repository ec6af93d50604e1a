"""`mrl` and `python -m mrl`: what stopping signals mean while there is nothing to stop yet, then the command."""

import os
import signal
import sys


def main() -> int:
    """Exit code of the command on this process's command line."""
    if sys.argv[1:2] == ["train"]:
        _listen()
    try:
        from mrl.cli import main as run
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return run()


def _listen() -> None:
    # ports.is_a_rank, without what ports imports. Nothing to close yet; the launcher says what happened
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return
    from mrl.resilience import preemption

    preemption.begin_later()


if __name__ == "__main__":
    sys.exit(main())
