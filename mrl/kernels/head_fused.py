"""The loss head's products with transformer-engine's fp8 matrix multiplication.

Written from its sources of 2.9 to 2.11; on an H100 its casts equal those of `mrl.kernels.fp8` bit for bit.
"""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mrl.kernels.fp8 import E5M2, Recipe, Role
from mrl.kernels.head_products import add_wide_product, wide_product

_ALIGN = 128  # of rows: tiles of every recipe


class FusedFP8Products:
    """fp8 products: the weight is cast once for all chunks of a pass, hidden states and logit gradients chunk by
    chunk.
    """

    logits_dtype = torch.float32
    waits = False

    def __init__(self, hidden: Tensor, weight: Tensor, recipe: Recipe) -> None:
        self._hidden, self._weight, self._recipe = hidden, weight, recipe
        self.gradient_dtype = hidden.dtype

    def logits(self, rows: slice) -> Tensor:
        hidden = _cast(_padded(self._hidden[rows]), "input", self._recipe)
        made = _multiply(self._cast_weight, hidden, "TN", torch.float32)
        return made[: self._hidden[rows].size(0)]

    def d_hidden(self, dx: Tensor) -> Tensor:
        made = _multiply(self._cast_weight, _cast(_padded(dx), "gradient", self._recipe), "NN", dx.dtype)
        return made[: dx.size(0)]

    def add_d_weight(self, total: Tensor | None, dx: Tensor, rows: slice) -> Tensor:
        hidden = self._hidden[rows]
        if self._recipe.wgrad:
            operands = _cast(_padded(hidden), "input", self._recipe), _cast(_padded(dx), "gradient", self._recipe)
            return _multiply(*operands, "NT", torch.float32, total)
        return wide_product(dx.T, hidden) if total is None else add_wide_product(total, dx.T, hidden)

    @cached_property
    def _cast_weight(self) -> Any:
        return _cast(self._weight, "weight", self._recipe)


def _padded(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, -x.size(0) % _ALIGN)).contiguous()


def _cast(x: Tensor, role: Role, recipe: Recipe) -> Any:
    """Casts along both dimensions, as transformer-engine's own layers do."""
    import transformer_engine_torch as tex

    dtype = tex.DType.kFloat8E5M2 if recipe.format(role) == E5M2 else tex.DType.kFloat8E4M3
    if recipe.scaling == "mxfp8":
        from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

        return MXFP8Quantizer(fp8_dtype=dtype)(x)
    if recipe.scaling == "blockwise":
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

        dims = 2 if role == "weight" else 1
        return Float8BlockQuantizer(fp8_dtype=dtype, rowwise=True, columnwise=True, block_scaling_dim=dims)(x)
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    return Float8CurrentScalingQuantizer(fp8_dtype=dtype, device=x.device)(x)


def _multiply(a: Any, b: Any, layout: str, dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
    """Multiplies in cuBLAS' column order: TN b @ a.T, NN b @ a, NT b.T @ a; adds to `total`, in place, if given.

    Older versions need a workspace.
    """
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    room: dict[str, Any] = {} if total is None else {"out": total, "accumulate": True}
    if "workspace" in inspect.signature(general_gemm).parameters:
        from transformer_engine.pytorch.module.base import get_workspace

        room["workspace"] = get_workspace()
    made: Tensor = general_gemm(a, b, out_dtype=dtype, layout=layout, use_split_accumulator=True, **room)[0]
    return made
