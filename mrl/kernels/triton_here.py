"""Whether kernels by triton can be compiled where this process runs."""

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
    """For tensors on a GPU: everywhere where it can compile, but with MRL_KERNELS=torch."""
    return os.environ.get("MRL_KERNELS") != "torch" and problem() is None


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels of `mrl.kernels.algo_triton` take these, beside masks."""
    fits = all(x.is_cuda and x.dtype == torch.float32 and x.is_contiguous() for x in tensors)
    return fits and is_chosen()


@cache
def problem() -> str | None:
    """Why not, in one line; None if they can."""
    try:
        importlib.import_module("triton")
    except Exception as error:
        first = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {first}"
    return compiler_problem()


def compiler_problem() -> str | None:
    """What a triton that is there lacks: it compiles a launcher, in C, at run time."""
    try:
        build.compiler()
    except build.CannotBuild as error:
        return f"{error}, which it calls at run time"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    elsewhere = [Path(folder) / "Python.h" for folder in os.environ.get("CPATH", "").split(os.pathsep) if folder]
    if not any(file.is_file() for file in (header, *elsewhere)):
        return f"{header} is not there (Debian: python3-dev), which it compiles with at run time"
    return None
