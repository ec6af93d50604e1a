"""Kernels for CPUs in C: compiled when a process first asks for one, and kept for all that come later.

They compute what the torch form beside each does, in one pass where torch needs several, on one thread. Where there is
no C compiler, where tensors are others than they take, or with MRL_KERNELS=torch, that form is what runs.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mrl.kernels.native import build

WIDTH = 16  # of the kernels' vectors: rows have a multiple of it
_PLAIN = (Tensor, nn.Parameter)  # any other may have no memory of its own


@functools.cache
def problem() -> str | None:
    """Why they cannot be used here; None if they can."""
    if os.environ.get("MRL_KERNELS") == "torch":
        return "MRL_KERNELS=torch"
    try:
        _library()
    except build.CannotBuild as error:
        return str(error)
    return None


def compiler() -> str | None:
    """The one that is found here, with its path."""
    try:
        return build.compiler()
    except build.CannotBuild:
        return None


def serves_float32(*tensors: Tensor) -> bool:
    """`serves`, and all are float32."""
    return all(x.dtype == torch.float32 for x in tensors) and serves(*tensors)


def serves(*tensors: Tensor) -> bool:
    """Whether these are on a CPU, of a process with one thread for them."""
    usual = all(type(x) in _PLAIN and x.device.type == "cpu" for x in tensors)
    return usual and torch.get_num_threads() == 1 and problem() is None


def call(name: str, *arguments: Tensor | int | float | ctypes.Structure) -> int:
    """What the function of the library returns. Tensors are given as their addresses: contiguous, unless their strides
    are given too."""
    return int(_function(name)(*map(_argument, arguments)))


def run(name: str, *arguments: Tensor | int | float | ctypes.Structure) -> None:
    """`call`, of a function that says whether it has found memory. Raises MemoryError."""
    if not call(name, *arguments):
        raise MemoryError(f"no memory for {name}")


def with_whole_rows(x: Tensor) -> Tensor:
    """x, or a copy of it: the last dimension is in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _argument(given: Tensor | int | float | ctypes.Structure) -> Any:
    if isinstance(given, Tensor):
        return ctypes.c_void_p(given.data_ptr())
    if isinstance(given, float):
        return ctypes.c_float(given)
    return ctypes.c_int64(given) if isinstance(given, int) else ctypes.byref(given)


@functools.cache
def _function(name: str) -> Callable[..., int]:
    return getattr(_library(), name)


@functools.cache
def _library() -> ctypes.CDLL:
    file = build.library()
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise build.CannotBuild(f"{file} cannot be loaded ({error}): remove it") from error
