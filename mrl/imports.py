"""While a program imports nothing becomes garbage, and each look for it goes over more modules: a sixth of its time."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """No garbage is collected inside. What is there at the end is never looked at again, in no copy of this process
    either, which so shares its memory."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def main() -> None:
    """`python -m mrl.imports MODULE ARGUMENTS...`: what `python -m MODULE ARGUMENTS...` does by MODULE's `main`."""
    module = sys.argv.pop(1)
    with importing():
        program = importlib.import_module(module)
    program.main()


if __name__ == "__main__":
    main()
