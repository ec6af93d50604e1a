"""A model's state out of a checkpoint that other layers may have written.

transformer-engine's layers keep their fp8 state in objects, empty without fp8, which other layers do not have. Empty
ones are written too, since Megatron's own loader asks for them. What a checkpoint has none of is not asked for, and
what nothing takes is left there: it fits every kind of layer.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from mrl import platform
from mrl.families import ModelArch
from mrl.families.adapters import LoRA, adapter_table, is_adapter
from mrl.families.table import Role
from mrl.models.naming import global_name
from mrl.parallel import Mesh
from mrl.weights.errors import WeightError

platform.install()
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor  # noqa: E402

BESIDE = "_extra_state"


def wanted(sharded: Mapping[str, Any], stored: Container[str]) -> dict[str, Any]:
    """Of a `sharded_state_dict`, nested or not, what a checkpoint with the keys `stored` can be asked for: parameters,
    there or not, and such objects as it has."""
    return {
        name: wanted(entry, stored) if isinstance(entry, dict) else entry
        for name, entry in sharded.items()
        if not (_is_beside(entry) and entry.unique_key not in stored)
    }


def _is_beside(entry: Any) -> bool:
    return isinstance(entry, ShardedObject) and entry.key.endswith(BESIDE)


def sharded_adapters(chunk: nn.Module, arch: ModelArch, role: Role, lora: LoRA, mesh: Mesh) -> dict[str, ShardedTensor]:
    """What is trained of a model with adapters, by its name in the chunk, in the form that `sharded_state_dict` has. A
    tensor is kept under its global name, whole under any layout."""
    table = adapter_table(arch, role, lora)
    found = {}
    for local, parameter in chunk.named_parameters():
        if not parameter.requires_grad:
            continue
        name = global_name(chunk, local)
        row = table[name]
        tp, tp_rank = mesh.tensor_cut(row.expert)
        copy = mesh.edp_rank if row.expert else dist.get_rank(mesh.dp_cp_group)
        cut = [] if row.tp_dim is None else [(row.tp_dim, tp_rank, tp)]
        replica = (0, 0 if cut else tp_rank, copy)
        found[local] = ShardedTensor.from_rank_offsets(name, parameter, *cut, replica_id=replica)
    return found


def fill(chunk: nn.Module, state: dict[str, Any]) -> None:
    """Puts `state` into the parameters, beside adapters into what is trained alone. Raises WeightError if one of them,
    or of the state, is left over."""
    left = chunk.load_state_dict(state, strict=False)
    parameters = dict(chunk.named_parameters())
    is_adapted = any(map(is_adapter, parameters))
    frozen = {name for name, parameter in parameters.items() if is_adapted and not parameter.requires_grad}
    problems = [f"{name} is missing" for name in left.missing_keys if BESIDE not in name and name not in frozen]
    problems += [f"nothing takes {name}" for name in left.unexpected_keys if BESIDE not in name]
    if problems:
        raise WeightError("; ".join(problems))
