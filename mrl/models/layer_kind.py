"""Which layers a model is made of, where the configuration leaves it to the machine."""

from __future__ import annotations

from typing import Literal

import torch

from mrl import platform
from mrl.families import UnsupportedModel

LayerKind = Literal["local", "transformer_engine"]


def layer_kind(wanted: Literal["auto", "local", "transformer_engine"], dtype: torch.dtype) -> LayerKind:
    """What `wanted` is here, for weights of `dtype`: transformer-engine's for "auto" where it can be used.

    float32 is always local: transformer-engine multiplies it as TF32, whatever torch is told. Raises UnsupportedModel
    if transformer-engine is asked for and cannot do it.
    """
    if wanted == "local":
        return "local"
    exact = dtype == torch.float32
    problem = "it multiplies float32 as TF32" if exact else platform.transformer_engine_problem()
    if problem is None:
        return "transformer_engine"
    if wanted == "transformer_engine":
        raise UnsupportedModel(f"layers: transformer_engine cannot be used: {problem}")
    return "local"
