"""Which layers a model is made of, where the configuration leaves it to the machine."""

from __future__ import annotations

from typing import Literal

import torch

from mrl import platform
from mrl.families import FAMILIES, ModelArch, UnsupportedModel

LayerKind = Literal["local", "transformer_engine"]


def layer_kind(
    wanted: Literal["auto", "local", "transformer_engine"], dtype: torch.dtype, arch: ModelArch
) -> LayerKind:
    """What `wanted` is here, for weights of `dtype`: transformer-engine's for "auto" where it can be used.

    Families that need what it has not are always local; so is float32: transformer-engine multiplies it as TF32,
    whatever torch is told. Raises UnsupportedModel if transformer-engine is asked for and cannot do it.
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
        return "it multiplies float32 as TF32"
    lacks = FAMILIES[arch.family].local_only
    return None if lacks is None else f"{arch.family} needs {lacks}"
