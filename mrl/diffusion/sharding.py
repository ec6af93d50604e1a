"""FSDP2 sharding of a net, and helpers for whole and sharded tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.embeddings import CombinedTimestepLabelEmbeddings
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from mrl import platform
from mrl.parallel import rank, world_size


def shard(net: nn.Module, dtype: torch.dtype) -> None:
    """Shards every block's weights over the ranks. Collective.

    Each backward pass then sums gradients over ranks in float32; every rank must call the net equally often.

    dtype: of weights in communication and computation
    """
    mesh = init_device_mesh(platform.device().type, (world_size(),))
    computed = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(computed, torch.float32, cast_forward_inputs=False)
    for block in (*blocks(net), net):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sums, not means
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums


def blocks(net: nn.Module) -> Iterator[nn.Module]:
    """Yields the units that are gathered at once: items of the net's lists and its middle block.

    Modules in these that the net calls directly come first, such as the embeddings in a DiT's first block.
    """
    yield from (module for module in net.modules() if isinstance(module, CombinedTimestepLabelEmbeddings))
    for name, child in net.named_children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif name == "mid_block":
            yield child


def is_sharded(net: nn.Module) -> bool:
    return isinstance(net, FSDPModule)


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Returns the whole tensor as a copy in host memory. Collective for a sharded tensor."""
    found = tensor.detach()
    if isinstance(found, DTensor):
        found = found.full_tensor()
    return found.to("cpu", copy=True)


@torch.no_grad()
def fill(target: Tensor, given: Tensor | None) -> None:
    """Copies rank 0's whole tensor `given` into every rank's `target`. Collective."""
    value: Any = given.to(target.device, target.dtype) if given is not None and rank() == 0 else None
    if isinstance(target, DTensor):
        if value is None:
            value = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        target.copy_(distribute_tensor(value, target.device_mesh, target.placements))
        return
    if value is not None:
        target.copy_(value)
    if world_size() > 1:
        dist.broadcast(target, 0)
