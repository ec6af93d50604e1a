"""Disables garbage collection during imports, which create no garbage but make each collection slower (a sixth of the
time)."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disables garbage collection in the block.

    Objects present at its end are never traversed again, nor in forks of this process, which thereby share their
    memory.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def main() -> None:
    """Runs `python -m mrl.imports MODULE ARGUMENTS...` like `python -m MODULE ARGUMENTS...`, by MODULE's `main`."""
    module = sys.argv.pop(1)
    with importing():
        program = importlib.import_module(module)
    program.main()


if __name__ == "__main__":
    main()
