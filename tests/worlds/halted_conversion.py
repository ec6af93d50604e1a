"""Runs `mrl convert` with the arguments, prints "half" when half of the weights are written, and then waits."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

from mrl.cli import main
from mrl.weights.convert import blocks, worker_pool

BLOCKS = 8  # number of writes so far

worker_pool.END_TIMEOUT_S = 0.1
read, count = blocks._BlockBuffer.read, itertools.count(1)


def slow(bucket: Any, block: Any) -> Any:
    if (number := next(count)) > BLOCKS:
        if number == BLOCKS + 1:
            print("half", flush=True)
        time.sleep(600)
    return read(bucket, block)


if __name__ == "__main__":
    blocks._BlockBuffer.read = slow  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
