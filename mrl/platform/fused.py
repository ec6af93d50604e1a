"""Availability of fused GPU layers and kernels, with the reason if they are missing; decided once a process."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from functools import cache

import torch

from mrl.kernels import triton_support

TRANSFORMER_ENGINE = "transformer_engine.pytorch"  # the top package alone hides import errors below it
KERNELS = ("torch",)  # values of MRL_KERNELS
APEX_KERNEL = "fused_weight_gradient_mlp_cuda"  # the kernel used of apex; a build without CUDA lacks it


@cache
def import_problem(module: str) -> str | None:
    """Returns why the module cannot be imported, in one line; None if it can.

    The import may raise anything. transformer-engine raises RuntimeError (the top package alone), OSError (built
    against other libraries) or AssertionError (parts of different versions).
    """
    if module == TRANSFORMER_ENGINE:
        _name_cudnn()
    try:
        importlib.import_module(module)
    except Exception as error:
        text = str(error).strip() or module
        return f"{type(error).__name__}: {text.splitlines()[0]}"
    return None


def _name_cudnn() -> None:
    """Points transformer-engine to torch's cudnn.

    It would look in the CUDA toolkit first; with two cudnn in one process, attention fails with
    CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED.
    """
    try:
        found = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:
        return
    places = list(found.submodule_search_locations or []) if found is not None else []
    if places and "CUDNN_PATH" not in os.environ:
        os.environ.setdefault("CUDNN_HOME", places[0])


@cache
def transformer_engine_fault() -> str | None:
    """Returns why an installed transformer-engine cannot be imported; None if it is absent or works."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    return import_problem(TRANSFORMER_ENGINE)


@cache
def transformer_engine_problem() -> str | None:
    """Returns why transformer-engine layers are impossible here, in one line; None if they work. May import
    Megatron."""
    if not torch.cuda.is_available():
        return "it needs CUDA"
    return import_problem(TRANSFORMER_ENGINE) or _megatron_problem()


def _megatron_problem() -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.extensions.transformer_engine import HAVE_TE
    return None if HAVE_TE else "megatron-core does not support its version"


def transformer_engine_usable() -> bool:
    return transformer_engine_problem() is None


def apex_usable() -> bool:
    """True with CUDA and apex's kernel that accumulates gradients in place."""
    return torch.cuda.is_available() and import_problem(APEX_KERNEL) is None


def check_kernels() -> None:
    """Raises ValueError for an unknown value of MRL_KERNELS."""
    word = os.environ.get("MRL_KERNELS", "")
    if word not in ("", *KERNELS):
        raise ValueError(f"MRL_KERNELS is {word!r}; known: {', '.join(KERNELS)}")


@cache
def triton_usable() -> bool:
    """True with CUDA and a triton that can compile kernels."""
    return torch.cuda.is_available() and triton_support.problem() is None
