"""A second device for machines that have none: torch's `meta`, with the rules of CUDA about tensors that meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default)


class SecondDevice(TorchDispatchMode):
    """Inside, `meta` tensors refuse what CUDA's would: to be computed with beside CPU tensors, single numbers and
    indices into them excepted. By itself `meta` lets a CPU tensor be indexed by one of its own."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _COPIES:
            _require_one_device(func, list(_tensors((args[:1], args[2:]) if func in _INDEXED else args)))
        if func in _INDEXED and args[0].device.type == "cpu":
            _require_one_device(func, [args[0], *_tensors(args[1])])
        return func(*args, **(kwargs or {}))


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
