"""`python -m mrl` is the `mrl` command."""

import os
import signal
import sys

if __name__ == "__main__":
    if "RANK" in os.environ and sys.argv[1:2] == ["train"]:  # nothing to close yet; the launcher says what happened
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from mrl.cli import main
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(main())
