"""Parameters that transformer-engine holds in fp8 (`precision.fp8.params`), and all others, by the same two functions.

Such a parameter keeps, until the optimizer takes it, the values that it was made from (`get_high_precision_init_val`):
float32 main weights start from those. Whoever writes the parameter alone would see the first update throw it away.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INITIAL = "get_high_precision_init_val"


def is_quantized(parameter: Tensor) -> bool:
    """Whether its values are in fp8."""
    return hasattr(parameter, "dequantize") and hasattr(parameter, _INITIAL)


@torch.no_grad()
def write(parameter: Tensor, values: Tensor) -> None:
    """Gives it these values, of its shape; of one in fp8 they are rounded, but not for its main weights."""
    parameter.data.copy_(values)
    if is_quantized(parameter) and (initial := getattr(parameter, _INITIAL)()) is not None:
        initial.copy_(values)


def values_of(parameter: Tensor) -> Tensor:
    """Its values, without gradient: itself, or of one in fp8 what that stands for, in its nominal dtype."""
    return parameter.dequantize().detach() if is_quantized(parameter) else parameter.detach()
