"""The same as `mrl convert`: python tools/convert_checkpoint.py hf-to-megatron SRC DST [--verify]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mrl.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
