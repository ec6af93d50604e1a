"""`python -m mrl` is the `mrl` command."""

import sys

from mrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
