"""An imitation of a second device for machines without one: torch's `meta`, with CUDA's rules on mixing devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")
aten = torch.ops.aten
_COPIES = (aten.copy_.default, aten._to_copy.default)
_INDEXED = (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default)


class SecondDevice(TorchDispatchMode):
    """A mode in which `meta` tensors refuse what CUDA tensors would refuse: operations with CPU tensors, except scalars
    and CPU indices into them. Without it, `meta` allows indexing a CPU tensor by a `meta` tensor.

    Copies back to the CPU, and the results of collectives, are zero, because `meta` holds no data.

    chosen: share of the elements that a boolean mask selects
    """

    def __init__(self, chosen: float = 0.5) -> None:
        super().__init__()
        self.chosen = chosen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES:
            return _copy(func, args, kwargs)
        if func.namespace == "c10d":
            return func(*tree_map(_on_cpu, args), **kwargs)
        if func is aten._local_scalar_dense.default and args[0].device == DEVICE:
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is aten.masked_select.default and args[0].device == DEVICE:
            _require_one_device(func, list(args))
            return args[0].new_empty(int(self.chosen * args[1].numel()))
        _require_one_device(func, list(_tensors((args[:1], args[2:]) if func in _INDEXED else args)))
        if func in _INDEXED and args[0].device.type == "cpu":
            _require_one_device(func, [args[0], *_tensors(args[1])])
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    return (
        torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) and value.device == DEVICE else value
    )


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten.copy_.default:
        target, source, *_ = args
        back = source.device == DEVICE and target.device.type == "cpu"
        return target.zero_() if back else func(*args, **kwargs)
    (source,) = args
    if source.device == DEVICE and torch.device(kwargs.get("device") or DEVICE).type == "cpu":
        return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
    return func(*args, **kwargs)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _require_one_device(func: Callable[..., Any], tensors: list[Tensor]) -> None:
    devices = {tensor.device for tensor in tensors if tensor.dim() > 0 or tensor.device.type != "cpu"}
    if len(devices) > 1:
        raise RuntimeError(f"{func}: expected all tensors on one device, found {sorted(map(str, devices))}")
