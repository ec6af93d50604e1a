"""CPU kernels in C, compiled on first use and cached for later processes.

Each computes the same as the torch form beside it, in one pass instead of several, on one thread. The torch form runs
without a C compiler, for unsupported tensors, or with MRL_KERNELS=torch.
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
_PLAIN = (Tensor, nn.Parameter)  # other types may have no memory of their own


@functools.cache
def problem() -> str | None:
    """Returns why the kernels cannot be used here; None if they can."""
    if os.environ.get("MRL_KERNELS") == "torch":
        return "MRL_KERNELS=torch"
    try:
        _library()
    except build.BuildError as error:
        return str(error)
    return None


def compiler() -> str | None:
    """Returns the path of the compiler; None if there is none."""
    try:
        return build.compiler()
    except build.BuildError:
        return None


def supports_float32_tensors(*tensors: Tensor) -> bool:
    """Returns True if `supports_tensors` does and all tensors are float32."""
    return all(x.dtype == torch.float32 for x in tensors) and supports_tensors(*tensors)


def supports_tensors(*tensors: Tensor) -> bool:
    """Returns True if the tensors are on a CPU, in a process with one torch thread."""
    usual = all(type(x) in _PLAIN and x.device.type == "cpu" for x in tensors)
    return usual and torch.get_num_threads() == 1 and problem() is None


def call(name: str, *arguments: Tensor | int | float | ctypes.Structure) -> int:
    """Calls the library's function and returns its result.

    Tensors are passed as addresses: contiguous, unless their strides are passed too.
    """
    return int(_function(name)(*map(_argument, arguments)))


def run(name: str, *arguments: Tensor | int | float | ctypes.Structure) -> None:
    """Calls a function that reports whether memory was available. Raises MemoryError."""
    if not call(name, *arguments):
        raise MemoryError(f"no memory for {name}")


def with_whole_rows(x: Tensor) -> Tensor:
    """Returns x, or a copy of it, with a contiguous last dimension; same shape."""
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
        raise build.BuildError(f"{file} cannot be loaded ({error}): remove it") from error
