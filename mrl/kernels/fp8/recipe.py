"""transformer-engine's recipes: the format and scale of the operands of a layer's three products.

A product's blocks run along the dimension that it sums over. y = x w' sums over the inputs' width, dx = g w over the
outputs', dw = g' x over the tokens. An operand of two products is rounded for each, from its original values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from mrl.kernels.fp8.cast import E4M3, E5M2, Inverse, block_scale, round_trip, tensor_scale

Scaling = Literal["current", "delayed", "blockwise", "mxfp8"]
Role = Literal["input", "weight", "gradient"]
ROLES: tuple[Role, ...] = ("input", "weight", "gradient")
_WIDE, _NARROW = 128, 32  # block widths of blockwise and of mxfp8


@dataclass(frozen=True)
class Recipe:
    """fp8 recipe. hybrid: gradients are e5m2, with more range and less precision; wgrad: weight gradients use fp8
    products too.
    """

    scaling: Scaling
    hybrid: bool
    wgrad: bool = True

    @property
    def has_blocks(self) -> bool:
        """True if rounding depends on the dimension of the product's sum."""
        return self.scaling in ("blockwise", "mxfp8")

    def format(self, role: Role) -> torch.dtype:
        """Returns the format of an operand with this role."""
        return E5M2 if self.hybrid and role == "gradient" else E4M3

    def rounded(self, x: Tensor, role: Role, along: Literal[0, 1], scales: Scales | None = None) -> Tensor:
        """Returns the rounded values of x [m, k], float32 [m, k], in a product that sums over its dimension `along`.

        scales: amax history of delayed scaling; without it, delayed scales as current does.
        """
        dtype = self.format(role)
        if self.scaling == "delayed" and scales is not None:
            return round_trip(x, dtype, partial(scales.of, role))
        if self.scaling in ("current", "delayed"):
            return round_trip(x, dtype, partial(tensor_scale, dtype=dtype))
        if self.scaling == "mxfp8":
            return round_trip(x, dtype, partial(block_scale, dtype=dtype), _along(along, _NARROW))
        block = (_WIDE, _WIDE) if role == "weight" else _along(along, _WIDE)
        return round_trip(x, dtype, partial(tensor_scale, dtype=dtype, power_of_two=True), block)


def _along(dimension: Literal[0, 1], size: int) -> tuple[int, int]:
    return (size, 1) if dimension == 0 else (1, size)


class Scales:
    """Amax history of delayed scaling in one layer, per role, and the scales that follow from it.

    seen [3]: amax of this update so far; history [length, 3], newest first; scale [3]; all float32, in the order of
    ROLES. `roll` moves `seen` into the history.
    """

    def __init__(self, recipe: Recipe, length: int, use: Literal["max", "most_recent"], margin: int) -> None:
        self._use, self._margin = use, margin
        self._largest = torch.tensor([torch.finfo(recipe.format(role)).max for role in ROLES])
        self.seen, self.scale, self.history = torch.zeros(3), torch.ones(3), torch.zeros(length, 3)

    def to(self, device: torch.device) -> None:
        """Moves all tensors to the device."""
        self._largest, self.seen = self._largest.to(device), self.seen.to(device)
        self.scale, self.history = self.scale.to(device), self.history.to(device)

    def of(self, role: Role, amax: Tensor) -> Inverse:
        """Returns (scale, 1 / scale), 0-d, from the history, and records `amax` (0-d)."""
        place = ROLES.index(role)
        torch.maximum(self.seen[place], amax, out=self.seen[place])
        return self.scale[place], 1 / self.scale[place]

    def roll(self, seen: Tensor) -> None:
        """Appends `seen` [3], this update's amax over all participating ranks. An amax of 0 or infinity leaves the
        scale unchanged.
        """
        self.history = torch.cat([seen[None], self.history[:-1]])
        amax = self.history.amax(0) if self._use == "max" else seen
        scale = (self._largest / amax / 2.0**self._margin).clamp(max=torch.finfo(torch.float32).max)
        self.scale = torch.where(amax.isfinite() & (amax > 0), scale, self.scale)
        self.forget()

    def forget(self) -> None:
        """Clears the amax seen since the last update."""
        self.seen = torch.zeros_like(self.seen)

    def state(self) -> Tensor:
        """Returns the whole state, float32 [6 + 3 * length]."""
        return torch.cat([self.seen, self.scale, self.history.flatten()])

    def restore(self, state: Tensor) -> None:
        """Restores `state`. Raises ValueError for another length."""
        if state.shape != (6 + self.history.numel(),):
            raise ValueError(f"{state.numel()} numbers, expected {6 + self.history.numel()}")
        state = state.to(self.seen)
        self.seen, self.scale = state[:3].clone(), state[3:6].clone()
        self.history = state[6:].view_as(self.history).clone()
