"""Bitwise reproducible GPU runs: slower, and not possible for every operation.

CPU runs are bitwise reproducible with and without it.
"""

from __future__ import annotations

import os

import torch
import torch.utils.deterministic

# Read by cuBLAS, NCCL and transformer-engine when they start. Other values of the first two that the user has set
# fix the order of sums as well and are kept; torch rejects a value of the first that does not.
CHOSEN = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
REQUIRED = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def enable_determinism() -> None:
    """Selects algorithms with a fixed order of sums; torch then raises RuntimeError, with the name, for operations
    without one.

    Call it before CUDA starts and before models are built. Processes started later inherit the environment.
    """
    os.environ.update({**CHOSEN, **{name: os.environ[name] for name in CHOSEN if name in os.environ}, **REQUIRED})
    torch.use_deterministic_algorithms(True)
    # mrl and Megatron write before they read; a property of the module, which type checkers do not see
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def is_deterministic() -> bool:
    enabled: bool = torch.are_deterministic_algorithms_enabled()
    return enabled
