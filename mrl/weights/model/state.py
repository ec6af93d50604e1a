"""Model state from a checkpoint that another layer implementation may have written.

transformer-engine's layers keep their fp8 state in objects (empty without fp8), which other layers do not have. Empty
objects are written too, since Megatron's own loader asks for them. Objects missing from a checkpoint are not requested,
and unused ones are ignored: a checkpoint fits every kind of layer.
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

EXTRA_STATE = "_extra_state"


def requested_entries(sharded: Mapping[str, Any], stored: Container[str]) -> dict[str, Any]:
    """Returns the entries of a `sharded_state_dict`, nested or not, to request from a checkpoint with the keys
    `stored`: all parameters, and the objects that it has.
    """
    return {
        name: requested_entries(entry, stored) if isinstance(entry, dict) else entry
        for name, entry in sharded.items()
        if not (_is_extra_state(entry) and entry.unique_key not in stored)
    }


def _is_extra_state(entry: Any) -> bool:
    return isinstance(entry, ShardedObject) and entry.key.endswith(EXTRA_STATE)


def sharded_adapters(chunk: nn.Module, arch: ModelArch, role: Role, lora: LoRA, mesh: Mesh) -> dict[str, ShardedTensor]:
    """Returns the trainable parameters of a model with adapters, by name in the chunk, in the form of
    `sharded_state_dict`. A tensor is stored whole under its global name, under any layout.
    """
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
    """Loads `state` into the parameters; with adapters, into the trainable ones alone. Raises WeightError if a
    parameter or an entry of the state is left over.
    """
    left = chunk.load_state_dict(state, strict=False)
    parameters = dict(chunk.named_parameters())
    is_adapted = any(map(is_adapter, parameters))
    frozen = {name for name, parameter in parameters.items() if is_adapted and not parameter.requires_grad}
    problems = [f"{name} is missing" for name in left.missing_keys if EXTRA_STATE not in name and name not in frozen]
    problems += [f"the model has no {name}" for name in left.unexpected_keys if EXTRA_STATE not in name]
    if problems:
        raise WeightError("; ".join(problems))
