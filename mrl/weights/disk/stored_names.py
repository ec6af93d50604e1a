"""What Megatron's checkpoints call the parameters of the weight table.

Megatron stacks what repeats: all layers' matrices of one kind are one tensor [layers, ...], those of experts one
[layers, experts, ...]. So a name with its numbers taken out has one key, and the numbers are the first indices. The
keys are Megatron's own: they are read off a model of two layers that holds no memory.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mrl import platform
from mrl.config.schema import ParallelConfig
from mrl.families import ModelArch
from mrl.families.table import Role, weight_table
from mrl.models.build import build_skeleton
from mrl.models.naming import global_name
from mrl.parallel import Meshes
from mrl.weights.errors import WeightError

platform.install()
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory  # noqa: E402

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_ONE_PROCESS = ParallelConfig()


# the one key that Megatron's two specs of a layer of experts disagree about: the local one's, transformer-engine's
OF_EXPERTS = ("decoder.layers.mlp.linear_fc1.layer_norm_weight", "decoder.layers.pre_mlp_layernorm.weight")


def stored_key(key: str, stored: Container[str]) -> str:
    """What a checkpoint with the keys `stored` calls `key`: itself, or the same in the other spec's words."""
    ours, theirs = OF_EXPERTS
    return theirs if key == ours and ours not in stored and theirs in stored else key


@dataclass(frozen=True)
class Names:
    """keys: Megatron's key of each pattern of names. objects: keys of the (empty) objects beside the parameters."""

    keys: Mapping[str, str]
    objects: tuple[tuple[str, int], ...]  # key, leading dimensions

    def place(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(key, leading indices) of a parameter of the weight table. What is not listed is not stacked."""
        pattern = pattern_of(name)
        return self.keys.get(pattern, pattern), tuple(int(number) for number in _NUMBER.findall(name))


def pattern_of(name: str) -> str:
    return _NUMBER.sub("*", name)


def leading_shape(arch: ModelArch, dimensions: int) -> tuple[int, ...]:
    """The stacked dimensions: none, (layers,) or (layers, experts)."""
    return (arch.num_layers, arch.experts.count if arch.experts else 0)[:dimensions]


def stored_names(arch: ModelArch, hf_path: str, role: Role, meshes: Meshes) -> Names:
    """Collective over the world, as every Mesh is. Raises WeightError if Megatron does not stack as said above."""
    mesh = meshes.get(_ONE_PROCESS)
    small = replace(arch, layers=arch.layers[:2])
    with mesh.active():
        model = build_skeleton(small, hf_path, mesh, role)
        state = model.sharded_state_dict(metadata={"dp_cp_group": mesh.dp_cp_group})
        keys: dict[str, str] = {}
        objects: dict[str, int] = {}
        for local_name, entry in state.items():
            if isinstance(entry, ShardedObject):
                objects[entry.key] = len(entry.global_shape)
            else:
                name = global_name(model, local_name)
                keys[pattern_of(name)] = _key(name, entry)
    missing = {pattern_of(name) for name, row in weight_table(arch, role).items() if row.copy_of is None} - set(keys)
    if missing:
        raise WeightError(f"Megatron's checkpoints hold nothing for {', '.join(sorted(missing))}")
    return Names(keys, tuple(objects.items()))


def _key(name: str, entry: Any) -> str:
    first: ShardedTensor = entry.build()[0] if isinstance(entry, ShardedTensorFactory) else entry
    while not isinstance(first, ShardedTensor):
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    lead = first.global_offset[: first.prepend_axis_num]
    if list(lead) != [int(number) for number in _NUMBER.findall(name)]:
        raise WeightError(f"Megatron stores {name} as {first.key} at {first.global_offset}: not stacked by its numbers")
    return str(first.key)
