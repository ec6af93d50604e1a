"""GPU and CUDA requirements of transformer-engine's fp8 recipes; plain numbers, so that a plan needs neither."""

from __future__ import annotations

from dataclasses import dataclass

Version = tuple[int, int]


@dataclass(frozen=True)
class ChipRequirements:
    """Requirements of a recipe. capability, below: bounds of the GPU's compute capability; cuda: oldest CUDA of torch's
    build"""

    capability: Version
    below: Version | None = None
    cuda: Version = (12, 1)


RECIPES = {
    "current": ChipRequirements((8, 9)),
    "delayed": ChipRequirements((8, 9)),
    "blockwise": ChipRequirements((9, 0), cuda=(12, 9)),
    "mxfp8": ChipRequirements((10, 0), below=(12, 0)),
}


def chip_problem(recipe: str, capability: Version, cuda: Version | None, chip: str = "this GPU") -> str | None:
    """Returns why a GPU of this compute capability, with this CUDA if known, cannot run the recipe; None if it can."""
    needs = RECIPES[recipe]
    if capability < needs.capability or (needs.below is not None and capability >= needs.below):
        bound = f" and below {_dotted(needs.below)}" if needs.below is not None else ""
        asked = f"compute capability {_dotted(needs.capability)} or above{bound}"
        return f"{recipe} needs {asked}, and {chip} has {_dotted(capability)}"
    if cuda is not None and cuda < needs.cuda:
        return f"{recipe} needs CUDA {_dotted(needs.cuda)} or above, and this torch is built with {_dotted(cuda)}"
    return None


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
