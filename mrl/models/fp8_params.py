"""Reading and writing of parameters, including those that transformer-engine holds in fp8 (`precision.fp8.params`).

Until the optimizer takes it, an fp8 parameter keeps its original values (`get_high_precision_init_val`), from which the
float32 main weights start. Writing the parameter alone would be undone by the first update.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INITIAL = "get_high_precision_init_val"


def is_quantized(parameter: Tensor) -> bool:
    """Returns True if the parameter's values are in fp8."""
    return hasattr(parameter, "dequantize") and hasattr(parameter, _INITIAL)


@torch.no_grad()
def write(parameter: Tensor, values: Tensor) -> None:
    """Writes values of the parameter's shape; an fp8 parameter rounds them, its main weights do not."""
    parameter.data.copy_(values)
    if is_quantized(parameter) and (initial := getattr(parameter, _INITIAL)()) is not None:
        initial.copy_(values)


def values_of(parameter: Tensor) -> Tensor:
    """Returns the values without gradient: the parameter itself, or an fp8 one dequantized to its nominal dtype."""
    return parameter.dequantize().detach() if is_quantized(parameter) else parameter.detach()
