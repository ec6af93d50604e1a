"""Choice of the layer implementation, where the configuration leaves it to the machine."""

from __future__ import annotations

from typing import Literal

import torch

from mrl import platform
from mrl.families import FAMILIES, ModelArch, UnsupportedModel

LayerKind = Literal["local", "transformer_engine"]


def layer_kind(
    wanted: Literal["auto", "local", "transformer_engine"], dtype: torch.dtype, arch: ModelArch
) -> LayerKind:
    """Resolves `wanted` for weights of `dtype`: "auto" becomes transformer-engine's where it can be used.

    Families that need features it lacks are always local; so is float32, which transformer-engine multiplies as TF32
    whatever torch's settings. Raises UnsupportedModel if transformer-engine is requested and cannot be used.
    """
    if wanted == "local":
        return "local"
    problem = _why_local(dtype, arch) or platform.transformer_engine_problem()
    if problem is None:
        return "transformer_engine"
    if wanted == "transformer_engine":
        raise UnsupportedModel(f"layers: transformer_engine cannot be used: {problem}")
    return "local"


def _why_local(dtype: torch.dtype, arch: ModelArch) -> str | None:
    if dtype == torch.float32:
        return "it computes float32 products in TF32"
    lacks = FAMILIES[arch.family].local_only
    return None if lacks is None else f"{arch.family} needs {lacks}"
