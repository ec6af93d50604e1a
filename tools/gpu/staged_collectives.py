"""Collectives for ranks that share one device: gloo's, on copies in host memory.

NCCL refuses two ranks on one GPU. gloo supports CUDA tensors, but not in send, receive and reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

# Methods of a process group that write to their first argument. torch 2.13 renames those of a single tensor.
COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
)
RECEIVES = ("recv", "recv_anysource")  # the result is copied to the device when the caller waits


class StagedWork:
    """A receive whose result is copied to the device when the caller waits for it."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work, self._finish = work, finish

    def wait(self, *timeout: Any) -> bool:
        done: bool = self._work.wait(*timeout)
        self._finish()
        self._finish = lambda: None
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def install() -> None:
    """Makes every process group of this process stage its collectives; call once, before ranks communicate.

    It replaces methods of the groups. A mode of torch's dispatcher would not do: it belongs to one thread, but autograd
    has others, and Megatron binds functions of torch.distributed at import. A collective has ended when it returns,
    also with `async_op`. A send does not wait for its receiver, since two ranks may send to each other first.
    """
    for name in (*COLLECTIVES, *RECEIVES, "send"):
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _staged(getattr(dist.ProcessGroup, name), name))


def _staged(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
    def staged(group: dist.ProcessGroup, first: Any, *more: Any, **options: Any) -> Any:
        on_host, *others = tree_map(to_host, (first, *more))
        work = plain(group, on_host, *others, **tree_map(to_host, options))
        if name == "send":
            return work
        if name in RECEIVES:
            return StagedWork(work, lambda: copy_back(on_host, first))
        work.wait()
        copy_back(on_host, first)
        return work

    return staged


def to_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def copy_back(on_host: Any, targets: Any) -> None:
    """Writes through `data`, because autograd does not track a collective's writes either."""
    for source, target in zip(tree_leaves(on_host), tree_leaves(targets), strict=True):
        target.data.copy_(source)
