"""Check of the plan's arithmetic: builds its ranks for real, one after the other in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mrl import platform

platform.install()

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402

from mrl.config.schema import TrainConfig  # noqa: E402
from mrl.config.sections.lora import LoRAConfig  # noqa: E402
from mrl.families import ModelArch  # noqa: E402
from mrl.families.adapters import is_adapter  # noqa: E402
from mrl.families.table import Role, weight_table  # noqa: E402
from mrl.learner.optimizer import wrap_ddp  # noqa: E402
from mrl.models.build import build_model  # noqa: E402
from mrl.models.lora import attach  # noqa: E402
from mrl.models.naming import global_name  # noqa: E402
from mrl.parallel import Mesh  # noqa: E402
from mrl.plan.parameters import Elements, ModelElements  # noqa: E402


@dataclass(frozen=True)
class BuiltModel:
    """A rank's real model. names: of its parameters, chunk by chunk, with their elements."""

    names: tuple[tuple[tuple[str, int], ...], ...]
    held: ModelElements


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
    tower: bool = False,
    loras: Sequence[LoRAConfig] = (),
) -> BuiltModel:
    """Builds the rank's chunks and wraps them for training on the meta device, without memory; returns what the rank
    holds.

    overlap: as for `wrap_ddp`; tower: the vision tower is trained; loras: of the adapters that share the model.
    """
    with platform.fake_rank(rank, world), (mesh := Mesh(train.parallel)).active():
        models = build_model(arch, hf_path, train, mesh, dtype, role, seed=None, trains_vision=tower)
        if not loras:
            return _wrapped(models, arch, role, dtype, overlap)
        each, attached = list[BuiltModel](), None
        for lora in loras:
            attached = attach(models, arch, mesh, train.model_copy(update={"lora": lora}), 1, attached)
            each.append(_wrapped(models, arch, role, dtype, overlap))
        names = tuple(
            tuple(pair for own in each for pair in own.names[chunk] if own is each[0] or is_adapter(pair[0]))
            for chunk in range(len(models))
        )
        return BuiltModel(names, ModelElements.sharing([own.held for own in each]))


def _wrapped(models: list[Any], arch: ModelArch, role: Role, dtype: torch.dtype, overlap: bool) -> BuiltModel:
    parameters = [list(_planned(model, arch, role)) for model in models]
    names = tuple(tuple((name, p.numel()) for name, p in chunk) for chunk in parameters)
    wrapped = wrap_ddp(models, overlap=overlap)
    buffers = [buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    wide = [buffer for buffer in buffers if buffer.param_dtype == torch.float32 != dtype]
    return BuiltModel(
        names,
        ModelElements(
            weights=sum(numel for chunk in names for _, numel in chunk),
            frozen=sum(p.numel() for chunk in parameters for _, p in chunk if not p.requires_grad),
            buffer=sum(buffer.numel for buffer in buffers),
            shard=sum(_shard(buffer) for buffer in buffers),
            wide=Elements(
                weights=sum(p.numel() for buffer in wide for p in buffer.params),
                buffer=sum(buffer.numel for buffer in wide),
                shard=sum(_shard(buffer) for buffer in wide),
            ),
        ),
    )


def _planned(model: Any, arch: ModelArch, role: Role) -> Iterator[tuple[str, Any]]:
    """Yields its parameters except frozen router biases."""
    table = weight_table(arch, role)
    for name, parameter in model.named_parameters():
        row = table.get(global_name(model, name))
        if row is None or not row.frozen:
            yield name, parameter


def _shard(buffer: Any) -> int:
    """Elements that this rank's optimizer updates, by Megatron's own map."""
    (buckets,) = DistributedOptimizer._build_gbuf_range_map(buffer).values()
    return sum(places["param"].size for bucket in buckets for places in bucket["param_map"].values())
