"""An imitation of transformer-engine's fp8 weights in plain torch, registered in Megatron. Megatron's buffers,
distributed optimizer and checkpoints then take the code paths of real fp8 weights."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mrl.kernels.fp8 import E4M3, tensor_scale

aten = torch.ops.aten


class Float8(Tensor):
    """A tensor that holds e4m3 bytes and one scale; its dtype is only nominal. Reading it dequantizes, `copy_`
    quantizes, and like transformer-engine's blockwise tensors it has no flat view."""

    _data: Tensor
    _inverse: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, inverse: Tensor, dtype: torch.dtype, requires_grad: bool = False) -> Float8:
        made: Float8 = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, data.shape, dtype=dtype, device=data.device, requires_grad=requires_grad
        )
        made._data, made._inverse = data, inverse
        return made

    @classmethod
    def of(cls, values: Tensor) -> Float8:
        """Returns `values` rounded to e4m3, scaled by their own largest value."""
        made = cls(torch.empty(values.shape, dtype=torch.uint8), torch.ones(()), values.dtype)
        made.copy_(values)
        return made

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        return (self._data.view(E4M3).float() * self._inverse).to(dtype or self.dtype)

    def quantize(self, values: Tensor, amax: Tensor, start: int = 0) -> None:
        """Quantizes values [n] into the elements from `start` on. amax: largest absolute value of the whole tensor"""
        scale, inverse = tensor_scale(amax, E4M3)
        bits = (values.float() * scale).clamp(-448, 448).to(E4M3).view(torch.uint8)
        self._data.view(-1)[start : start + values.numel()] = bits
        self._inverse.copy_(inverse)

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"Float8({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return cls(args[0]._data, args[0]._inverse, args[0].dtype)
        if func is aten.copy_.default and isinstance(args[0], cls):
            values = args[1].dequantize() if isinstance(args[1], cls) else args[1]
            args[0].quantize(values.reshape(-1), values.float().abs().amax())
            return args[0]
        written = args[0] if func._schema.is_mutable else None
        if isinstance(written, cls):
            raise NotImplementedError(f"{func} would write into weights in fp8")
        if func is aten.view.default and isinstance(args[0], cls) and list(args[1]) != list(args[0].shape):
            raise NotImplementedError("weights in fp8 have no flat view")
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, Float8) else value


def parameter_of(values: Tensor) -> nn.Parameter:
    """Returns an fp8 parameter as transformer-engine's layers make it. It keeps its original values until
    `clear_high_precision_init_val`."""
    parameter = nn.Parameter(Float8.of(values.detach()))
    vars(parameter)["_initial"] = values.detach().clone()
    parameter.get_high_precision_init_val = MethodType(lambda self: vars(self).get("_initial"), parameter)  # type: ignore[attr-defined]
    parameter.clear_high_precision_init_val = MethodType(lambda self: vars(self).pop("_initial", None), parameter)  # type: ignore[attr-defined]
    return parameter


def into_fp8(model: nn.Module) -> None:
    """Converts the weight matrices of the layers to fp8, and keeps the attributes that Megatron set on them."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or "Parallel" not in type(module).__name__:
            continue
        if "Embedding" in type(module).__name__ or weight is getattr(model, "output_layer", module).weight:
            continue
        module._parameters["weight"] = made = parameter_of(weight)
        vars(made).update(vars(weight))


def tell_megatron() -> None:
    """Sets what Megatron would import from transformer-engine."""
    from megatron.core import fp8_utils

    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS, fp8_utils.FP8_TENSOR_CLASS = True, Float8
    fp8_utils.is_te_min_version = lambda *version, **options: True
    fp8_utils.te_post_all_gather_processing = lambda parameters: None
    fp8_utils._modify_underlying_storage_impl = _move
    fp8_utils._quantize_param_shard_impl = _quantize


def _move(parameter: Any, place: Tensor) -> None:
    place.copy_(parameter._data)
    parameter._data = place


def _quantize(parameters: list[Any], mains: list[Tensor | None], starts: list[int], group: Any, _: Any = None) -> None:
    """Quantizes this rank's part of each parameter, with a largest value that is reduced over all ranks."""
    for parameter, main, start in zip(parameters, mains, starts, strict=True):
        amax = torch.zeros(()) if main is None or not main.numel() else main.abs().amax()
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        if main is not None:
            parameter.quantize(main, amax, start)
        else:
            parameter._inverse.copy_(tensor_scale(amax, E4M3)[1])
