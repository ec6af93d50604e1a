"""Megatron models of Hugging Face architectures.

`mrl.models.arch` needs nothing but the standard library and is imported by the config checks, so the rest, which
imports megatron-core, is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mrl.models.arch import ModelArch, UnsupportedModel, is_reward_model, load_arch, read_hf_config

if TYPE_CHECKING:
    from mrl.models.batch import ModelBatch
    from mrl.models.build import build_model
    from mrl.models.naming import global_name, unwrap
    from mrl.models.transformer_config import padded_vocab_size

_LAZY = {
    "ModelBatch": "batch",
    "build_model": "build",
    "global_name": "naming",
    "padded_vocab_size": "transformer_config",
    "unwrap": "naming",
}

__all__ = [
    "ModelArch",
    "ModelBatch",
    "UnsupportedModel",
    "build_model",
    "global_name",
    "is_reward_model",
    "load_arch",
    "padded_vocab_size",
    "read_hf_config",
    "unwrap",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
