"""Emulation of transformer-engine's fp8 products in plain torch: the same rounding, scales and dimensions.

It is slow: its purpose is to reproduce the numbers on any machine.
"""

from mrl.kernels.fp8.cast import E4M3, E5M2, block_scale, quantized_blocks, round_trip, tensor_scale
from mrl.kernels.fp8.linear import fp8_linear
from mrl.kernels.fp8.recipe import ROLES, Recipe, Role, Scales

__all__ = [
    "E4M3",
    "E5M2",
    "ROLES",
    "Recipe",
    "Role",
    "Scales",
    "block_scale",
    "fp8_linear",
    "quantized_blocks",
    "round_trip",
    "tensor_scale",
]
