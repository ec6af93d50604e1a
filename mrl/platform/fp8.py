"""Which of transformer-engine's fp8 recipes the GPU of this process can compute, and if not why."""

from __future__ import annotations

import importlib
from importlib import metadata

import torch
from packaging.version import InvalidVersion, Version

from mrl.fp8_chips import RECIPES, chip_problem
from mrl.platform.fused import TRANSFORMER_ENGINE, transformer_engine_problem

VERSIONS = Version("2.9"), Version("2.12")  # of transformer-engine: from, and below, as megatron-core's extra has it


_ASKS = {  # how transformer-engine is asked
    "current": "is_fp8_available",
    "delayed": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}


def fp8_problem(recipe: str) -> str | None:
    """Why this recipe cannot be computed here, in one line with both numbers; None if it can. transformer-engine is
    asked too, where it is there, and its reason is passed on."""
    if (problem := transformer_engine_problem()) is not None:
        return problem
    if (problem := version_problem(metadata.version("transformer-engine"))) is not None:
        return problem
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    try:
        capability = torch.cuda.get_device_capability()
    except (AssertionError, RuntimeError) as error:
        return f"CUDA does not say what this GPU can do: {error}"
    return chip_problem(recipe, capability, (cuda[0], cuda[1])) or _refusal(recipe)


def version_problem(installed: str) -> str | None:
    """Why a transformer-engine of this version is none that megatron-core computes fp8 with."""
    first, end = VERSIONS
    try:
        fits = first <= Version(installed) < end
    except InvalidVersion:
        fits = False
    return None if fits else f"transformer-engine is {installed}; needed is {first} or later, below {end}"


def fp8_recipes() -> list[str]:
    """Those that can be computed here."""
    return [recipe for recipe in RECIPES if fp8_problem(recipe) is None]


def _refusal(recipe: str) -> str | None:
    ask = getattr(importlib.import_module(TRANSFORMER_ENGINE), _ASKS[recipe], None)
    if ask is None:
        return None
    is_there, why = ask(return_reason=True)
    return None if is_there else f"transformer-engine: {why or 'it says no more'}"
