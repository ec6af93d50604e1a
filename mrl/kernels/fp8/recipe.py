"""transformer-engine's recipes: which format and which scale the operands of a layer's three products have.

A product's blocks run along the dimension that it sums over. y = x w' sums over the inputs' width, dx = g w over the
outputs', dw = g' x over the tokens. What takes part in two products is rounded anew for each, from what it was.
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
_WIDE, _NARROW = 128, 32  # of a block of blockwise, of mxfp8


@dataclass(frozen=True)
class Recipe:
    """hybrid: gradients are e5m2, which reaches further and is coarser; wgrad: products for weight gradients too."""

    scaling: Scaling
    hybrid: bool
    wgrad: bool = True

    @property
    def has_blocks(self) -> bool:
        """Whether it matters along which dimension an operand is rounded."""
        return self.scaling in ("blockwise", "mxfp8")

    def format(self, role: Role) -> torch.dtype:
        """Of such an operand."""
        return E5M2 if self.hybrid and role == "gradient" else E4M3

    def rounded(self, x: Tensor, role: Role, along: Literal[0, 1], scales: Scales | None = None) -> Tensor:
        """float32 [m, k] values that x [m, k] has in a product which sums over dimension `along` of it. scales: where
        delayed scaling keeps what it remembers; without, it scales as current does."""
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
    """What delayed scaling remembers of one layer: per role the largest magnitudes of earlier updates, and the scale
    that follows from them. `roll` makes the magnitudes seen since then part of the past.

    seen [3]: in this update so far; history [length, 3], newest first; scale [3]; all float32, in the order of ROLES.
    """

    def __init__(self, recipe: Recipe, length: int, use: Literal["max", "most_recent"], margin: int) -> None:
        self._use, self._margin = use, margin
        self._largest = torch.tensor([torch.finfo(recipe.format(role)).max for role in ROLES])
        self.seen, self.scale, self.history = torch.zeros(3), torch.ones(3), torch.zeros(length, 3)

    def to(self, device: torch.device) -> None:
        """Moves all of it."""
        self._largest, self.seen = self._largest.to(device), self.seen.to(device)
        self.scale, self.history = self.scale.to(device), self.history.to(device)

    def of(self, role: Role, amax: Tensor) -> Inverse:
        """(scale, 1 / scale), 0-d, whatever amax (0-d) is now; that is remembered."""
        place = ROLES.index(role)
        torch.maximum(self.seen[place], amax, out=self.seen[place])
        return self.scale[place], 1 / self.scale[place]

    def roll(self, seen: Tensor) -> None:
        """seen [3]: of this update, over every rank that takes part. A magnitude of 0 or infinity leaves the scale as
        it is."""
        self.history = torch.cat([seen[None], self.history[:-1]])
        amax = self.history.amax(0) if self._use == "max" else seen
        scale = (self._largest / amax / 2.0**self._margin).clamp(max=torch.finfo(torch.float32).max)
        self.scale = torch.where(amax.isfinite() & (amax > 0), scale, self.scale)
        self.forget()

    def forget(self) -> None:
        """What was seen since the last update."""
        self.seen = torch.zeros_like(self.seen)

    def state(self) -> Tensor:
        """float32 [6 + 3 * length]: all that it remembers."""
        return torch.cat([self.seen, self.scale, self.history.flatten()])

    def restore(self, state: Tensor) -> None:
        """Takes `state` back. Raises ValueError for one of another length."""
        if state.shape != (6 + self.history.numel(),):
            raise ValueError(f"{state.numel()} numbers, expected {6 + self.history.numel()}")
        state = state.to(self.seen)
        self.seen, self.scale = state[:3].clone(), state[3:6].clone()
        self.history = state[6:].view_as(self.history).clone()
