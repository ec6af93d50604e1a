"""Ranks of a plan built for real, one after the other in this process: does the arithmetic hold?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mrl import platform

platform.install()

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402

from mrl.config.schema import TrainConfig  # noqa: E402
from mrl.families import ModelArch  # noqa: E402
from mrl.families.table import Role  # noqa: E402
from mrl.learner.optimizer import wrap_ddp  # noqa: E402
from mrl.models.build import build_model  # noqa: E402
from mrl.parallel import Mesh  # noqa: E402
from mrl.plan.parameters import Held  # noqa: E402


@dataclass(frozen=True)
class Built:
    """What a rank's model really is. names: of its parameters, chunk by chunk, with their elements."""

    names: tuple[tuple[tuple[str, int], ...], ...]
    held: Held


def build(
    arch: ModelArch,
    hf_path: str,
    role: Role,
    train: TrainConfig,
    rank: int,
    world: int,
    dtype: torch.dtype,
    *,
    overlap: bool = False,
) -> Built:
    """Builds the rank's chunks and wraps them for training, on the meta device: no memory, whatever the size. overlap:
    as for `wrap_ddp`."""
    with platform.imagined_rank(rank, world), (mesh := Mesh(train.parallel)).active():
        models = build_model(arch, hf_path, train, mesh, dtype, role, seed=None)
        names = tuple(tuple((name, p.numel()) for name, p in model.named_parameters()) for model in models)
        buffers = list(_buffers(wrap_ddp(models, overlap=overlap)))
        return Built(
            names,
            Held(
                weights=sum(numel for chunk in names for _, numel in chunk),
                buffer=sum(buffer.numel for buffer in buffers),
                shard=sum(_shard(buffer) for buffer in buffers),
            ),
        )


def _buffers(wrapped: list[Any]) -> Iterator[Any]:
    for chunk in wrapped:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def _shard(buffer: Any) -> int:
    """Elements that this rank's optimizer updates, by Megatron's own map of them."""
    (buckets,) = DistributedOptimizer._build_gbuf_range_map(buffer).values()
    return sum(places["param"].size for bucket in buckets for places in bucket["param_map"].values())
