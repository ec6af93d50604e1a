"""Availability of triton kernels in this process."""

from __future__ import annotations

import importlib
import os
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mrl.kernels.native import build


def is_chosen() -> bool:
    """Returns True if tensors on a GPU use triton: wherever it can compile, unless MRL_KERNELS=torch."""
    return os.environ.get("MRL_KERNELS") != "torch" and problem() is None


def supports(*tensors: Tensor) -> bool:
    """Returns True if the kernels of `mrl.kernels.algo_triton` support these tensors, besides masks."""
    fits = all(x.is_cuda and x.dtype == torch.float32 and x.is_contiguous() for x in tensors)
    return fits and is_chosen()


@cache
def problem() -> str | None:
    """Returns in one line why triton cannot compile; None if it can."""
    try:
        importlib.import_module("triton")
    except Exception as error:
        first = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {first}"
    return compiler_problem()


def compiler_problem() -> str | None:
    """Returns what an installed triton lacks to compile its C launcher at run time; None if nothing."""
    try:
        build.compiler()
    except build.BuildError as error:
        return f"{error}, which triton calls at run time"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    elsewhere = [Path(folder) / "Python.h" for folder in os.environ.get("CPATH", "").split(os.pathsep) if folder]
    if not any(file.is_file() for file in (header, *elsewhere)):
        return f"{header} is missing, which triton needs at run time (Debian: install python3-dev)"
    return None
