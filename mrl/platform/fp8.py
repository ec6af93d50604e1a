"""Support of transformer-engine's fp8 recipes on this process's GPU."""

from __future__ import annotations

import importlib
from importlib import metadata

import torch
from packaging.version import InvalidVersion, Version

from mrl.fp8_chips import RECIPES, chip_problem
from mrl.platform.fused import TRANSFORMER_ENGINE, transformer_engine_problem
from mrl.platform.megatron_versions import transformer_engine_range

_ASKS = {  # transformer-engine's check of each recipe
    "current": "is_fp8_available",
    "delayed": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}


def fp8_problem(recipe: str) -> str | None:
    """Returns why this recipe is impossible here, in one line with both numbers; None if it is possible.

    It also passes on transformer-engine's own reason, if that is installed.
    """
    if (problem := transformer_engine_problem()) is not None:
        return problem
    if (problem := version_problem(metadata.version("transformer-engine"))) is not None:
        return problem
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    try:
        capability = torch.cuda.get_device_capability()
    except (AssertionError, RuntimeError) as error:
        return f"CUDA does not report the compute capability of this GPU: {error}"
    return chip_problem(recipe, capability, (cuda[0], cuda[1])) or _refusal(recipe)


def version_problem(installed: str) -> str | None:
    """Returns why megatron-core cannot compute fp8 with this transformer-engine version; None if it can."""
    first, end = transformer_engine_range()
    try:
        fits = first <= Version(installed) < end
    except InvalidVersion:
        fits = False
    return None if fits else f"transformer-engine {installed} is installed; fp8 needs at least {first}, below {end}"


def fp8_recipes() -> list[str]:
    """Returns the recipes that are possible here."""
    return [recipe for recipe in RECIPES if fp8_problem(recipe) is None]


def _refusal(recipe: str) -> str | None:
    ask = getattr(importlib.import_module(TRANSFORMER_ENGINE), _ASKS[recipe], None)
    if ask is None:
        return None
    is_there, why = ask(return_reason=True)
    return None if is_there else f"transformer-engine refuses it: {why or 'without a reason'}"
