"""Lets an unchanged SGLang serve on a CPU that has neither triton nor sglang's own kernel package.

Four parts, all of them in force only inside the engine's processes:
  import_stubs       modules that sglang imports and, for text models on CPU, never calls
  kernels            the few sgl_kernel functions that the CPU path does call, in plain torch
  adaptations        deterministic sampling on CPU, attention in one padded call instead of one a request, rotations;
                     pictures between processes without torch's pickles
  model              the one model that is served, for sglang to find before it imports all

A machine where triton or sgl_kernel is really installed needs none of this: `install` then does nothing but say so.
Written against sglang 0.5.23.
"""

from __future__ import annotations

import gc
import importlib.util
import sys


def really_installed() -> list[str]:
    """The packages whose presence makes this directory unnecessary, as far as they are found."""
    return [name for name in ("triton", "sgl_kernel") if importlib.util.find_spec(name) is not None]


def install() -> None:
    present = really_installed()
    if present:
        print(f"mrl cpu engine shim: not active, because {' and '.join(present)} is installed", file=sys.stderr)
        return
    gc.disable()  # of what is imported nothing becomes garbage; until the server forks, see adaptations
    from . import adaptations, import_stubs

    import_stubs.install()
    adaptations.install()
