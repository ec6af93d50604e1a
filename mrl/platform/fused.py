"""Whether the fused layers and kernels for GPUs can be used here, and if not why: decided once a process."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from functools import cache

import torch

from mrl.kernels import triton_here

TRANSFORMER_ENGINE = "transformer_engine.pytorch"  # its top package is a shell, which hides what is wrong below it
KERNELS = ("torch",)  # that MRL_KERNELS may name
APEX_KERNEL = "fused_weight_gradient_mlp_cuda"  # what is wanted of apex; a build without CUDA has none


@cache
def import_problem(module: str) -> str | None:
    """Why the module cannot be imported, in one line; None if it can. Its import may raise anything: of
    transformer-engine RuntimeError (the shell alone), OSError (built against other libraries), AssertionError (parts
    of different versions)."""
    if module == TRANSFORMER_ENGINE:
        _name_cudnn()
    try:
        importlib.import_module(module)
    except Exception as error:
        text = str(error).strip() or module
        return f"{type(error).__name__}: {text.splitlines()[0]}"
    return None


def _name_cudnn() -> None:
    """It looks for cudnn in the CUDA toolkit before it takes torch's; of two in one process, attention fails with
    CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED."""
    try:
        found = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:
        return
    places = list(found.submodule_search_locations or []) if found is not None else []
    if places and "CUDNN_PATH" not in os.environ:
        os.environ.setdefault("CUDNN_HOME", places[0])


@cache
def transformer_engine_fault() -> str | None:
    """Why an installed transformer-engine cannot be imported; None if it is absent or can be."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    return import_problem(TRANSFORMER_ENGINE)


@cache
def transformer_engine_problem() -> str | None:
    """Why layers cannot be transformer-engine's here, in one line; None if they can. Imports Megatron if it may be."""
    if not torch.cuda.is_available():
        return "it needs CUDA"
    return import_problem(TRANSFORMER_ENGINE) or _megatron_problem()


def _megatron_problem() -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.extensions.transformer_engine import HAVE_TE
    return None if HAVE_TE else "megatron-core does not know this version of it"


def transformer_engine_usable() -> bool:
    return transformer_engine_problem() is None


def apex_usable() -> bool:
    """CUDA is there, and the kernel that adds to gradients in place."""
    return torch.cuda.is_available() and import_problem(APEX_KERNEL) is None


def check_kernels() -> None:
    """Raises ValueError for a word in MRL_KERNELS that chooses no kernels."""
    word = os.environ.get("MRL_KERNELS", "")
    if word not in ("", *KERNELS):
        raise ValueError(f"MRL_KERNELS is {word!r}; known: {', '.join(KERNELS)}")


@cache
def triton_usable() -> bool:
    """CUDA is there, and triton with what it needs to compile a kernel."""
    return torch.cuda.is_available() and triton_here.problem() is None
