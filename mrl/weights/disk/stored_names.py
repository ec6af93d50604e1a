"""Names of the weight table's parameters in Megatron's checkpoints.

Megatron stacks repeated parameters: all layers' matrices of one kind are one tensor [layers, ...], those of experts one
[layers, experts, ...]. A name without its numbers therefore has one key, and the numbers are the leading indices.
Layers that differ are not stacked (but their experts are): the key then contains the layer's number. A vision tower is
not stacked, since Megatron does not know it: its keys are the whole names. The keys are Megatron's own: they are read
from a skeleton model of a few layers without memory.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mrl import platform
from mrl.config.schema import ParallelConfig
from mrl.families import LayerArch, ModelArch
from mrl.families.table import Role, weight_table
from mrl.families.vision import TOWER
from mrl.models.build import build_skeleton
from mrl.models.naming import global_name
from mrl.parallel import Meshes
from mrl.weights.errors import WeightError

platform.install()
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory  # noqa: E402

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_ONE_PROCESS = ParallelConfig()


# the one key in which Megatron's two MoE layer specs differ: the local one's, transformer-engine's
OF_EXPERTS = (".mlp.linear_fc1.layer_norm_weight", ".pre_mlp_layernorm.weight")
_LAYER = re.compile(r"^decoder\.layers\.\d+\.")
_ANY_LAYER = "decoder.layers.{}."


def stored_key(key: str, stored: Container[str]) -> str:
    """Returns the key that a checkpoint with the keys `stored` uses for `key`: itself, or its name in the other layer
    spec.
    """
    ours, theirs = OF_EXPERTS
    other = key.removesuffix(ours) + theirs
    return other if key.endswith(ours) and key not in stored and other in stored else key


@dataclass(frozen=True)
class StoredNames:
    """Names of parameters in a checkpoint. keys: Megatron's key for each pattern of names, with {} for the number of a
    layer that is not stacked. objects: keys of the (empty) objects beside the parameters.
    """

    keys: Mapping[str, str]
    objects: tuple[tuple[str, tuple[int, ...]], ...]  # key, stacked dimensions

    def locate(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Returns (key, leading indices) of a parameter of the weight table. A parameter that is not listed is not
        stacked.
        """
        pattern, numbers = _stacked(name)
        key = self.keys.get(pattern, pattern)
        return (key.format(numbers[0]), numbers[1:]) if "{}" in key else (key, numbers)


class UnstackedNames(StoredNames):
    """Names of mrl's own tensors, such as adapters: every tensor has its whole name as key."""

    def __init__(self) -> None:
        super().__init__({}, ())

    def locate(self, name: str) -> tuple[str, tuple[int, ...]]:
        return name, ()


def pattern_of(name: str) -> str:
    return _NUMBER.sub("*", name)


def _stacked(name: str) -> tuple[str, tuple[int, ...]]:
    """Returns (pattern, numbers) of a parameter's name; for the vision tower the whole name and no numbers."""
    if name.startswith(TOWER):
        return name, ()
    return pattern_of(name), tuple(int(number) for number in _NUMBER.findall(name))


def leading_shape(arch: ModelArch, dimensions: int) -> tuple[int, ...]:
    """Returns the stacked dimensions: none, (layers,) or (layers, experts); for layers that differ none or
    (experts,).
    """
    experts = (arch.experts.count if arch.experts else 0,)
    return (experts if arch.layers_differ else (arch.num_layers, *experts))[:dimensions]


def stored_names(arch: ModelArch, hf_path: str, role: Role, meshes: Meshes) -> StoredNames:
    """Returns the names in Megatron's checkpoints. Collective over the world, as every Mesh is. Raises WeightError if
    Megatron does not stack parameters as the module docstring says.
    """
    mesh = meshes.get(_ONE_PROCESS)
    kinds = tuple(dict.fromkeys(arch.layers))
    count = 2 if arch.vision is None else max(2, len(arch.vision.deep))
    small = replace(arch, layers=kinds if arch.layers_differ else arch.layers[:count])
    with mesh.active():
        model = build_skeleton(small, hf_path, mesh, role)
        state = model.sharded_state_dict(metadata={"dp_cp_group": mesh.dp_cp_group})
        keys: dict[str, str] = {}
        objects: dict[str, tuple[int, ...]] = {}
        for local_name, entry in state.items():
            if isinstance(entry, ShardedObject):
                objects |= _objects(entry, arch, kinds)
            else:
                name = global_name(model, local_name)
                keys[_stacked(name)[0]] = _key(name, entry, arch.layers_differ)
    missing = {_stacked(name)[0] for name, row in weight_table(arch, role).items() if row.copy_of is None} - set(keys)
    if missing:
        raise WeightError(f"Megatron's checkpoint has no entry for {', '.join(sorted(missing))}")
    return StoredNames(keys, tuple(objects.items()))


def _objects(entry: ShardedObject, arch: ModelArch, kinds: Sequence[LayerArch]) -> dict[str, tuple[int, ...]]:
    """Returns the objects of the whole model that one object of the small model stands for."""
    if not arch.layers_differ or _LAYER.match(entry.key) is None:
        return {entry.key: leading_shape(arch, len(entry.global_shape))}
    kind = kinds[int(_NUMBER.findall(entry.key)[0])]
    template = _LAYER.sub(_ANY_LAYER, entry.key)
    return {template.format(i): entry.global_shape for i, layer in enumerate(arch.layers) if layer == kind}


def _key(name: str, entry: Any, by_layer: bool) -> str:
    first: ShardedTensor = entry.build()[0] if isinstance(entry, ShardedTensorFactory) else entry
    while not isinstance(first, ShardedTensor):
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    lead, numbers = tuple(first.global_offset[: first.prepend_axis_num]), _stacked(name)[1]
    key = str(first.key)
    if by_layer and _LAYER.match(key):
        key, numbers = _LAYER.sub(_ANY_LAYER, key), numbers[1:]
    if lead != numbers:
        raise WeightError(f"Megatron stores {name} as {first.key} at {first.global_offset}: not stacked by its numbers")
    return key
