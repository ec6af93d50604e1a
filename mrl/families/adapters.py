"""Low-rank adapters (LoRA, arXiv 2106.09685) of a model: the adapted linear layers, and the adapters' shapes.

A layer's weight W [out, in] becomes W + scale * B A, with A [rank, in] and B [out, rank]. Every linear layer of the
hub's has its own adapter, even where Megatron joins several in one parameter: that is PEFT's and the engines' form.
With DoRA (arXiv 2402.09353) each row of that sum is scaled to a length of its own, `magnitude`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from mrl.families.arch import ModelArch
from mrl.families.rows import ParameterMapping
from mrl.families.table import VALUE_HEAD, Role, weight_table

ALL_LINEAR = "all-linear"  # every linear layer of the decoder: not the embedding, the output layer or a router
ADAPTER_INFIX = ".lora."  # in the global names of adapters, and of nothing else


@dataclass(frozen=True)
class LoRA:
    """targets: the hub's names of linear layers, whole or from a dot on, or `ALL_LINEAR`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False
    dora: bool = False

    @property
    def scale(self) -> float:
        """Factor of B A: alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def adapts(self, layer: str) -> bool:
        """Returns True if the linear layer with this hub name has an adapter."""
        return any(each == ALL_LINEAR or f".{layer}".endswith(f".{each}") for each in self.targets)

    def record(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return {**vars(self), "targets": list(self.targets)}


def lora_of(record: Mapping[str, Any]) -> LoRA:
    """Returns the LoRA that `LoRA.record` recorded, ignoring other keys. Raises ValueError for an invalid record."""
    kinds = {"rank": int, "alpha": float, "targets": list, "rslora": bool, "dora": bool}
    if any(not isinstance(record.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"the record of adapters is {str(dict(record))[:120]}, and must have {', '.join(kinds)}")
    return LoRA(record["rank"], record["alpha"], tuple(record["targets"]), record["rslora"], record["dora"])


def is_adapter(name: str) -> bool:
    """Returns True if a parameter with this global name is an adapter's."""
    return ADAPTER_INFIX in name


def adapted_rows(arch: ModelArch) -> Iterator[tuple[str, ParameterMapping]]:
    """Yields (global name, row) of the decoder's linear layers, which may have adapters."""
    for name, row in weight_table(arch).items():
        is_cut_matrix = row.tp_dim is not None and all(len(shape) == 2 for shape in row.shapes)
        if name.startswith("decoder.layers.") and is_cut_matrix:
            yield name, row


def layer_of(hf: str) -> str:
    """Returns the linear layer's name, given its weight's."""
    return hf.removesuffix(".weight")


def part_of(hf: str) -> str:
    """Returns the linear layer's name inside its parent, such as q_proj."""
    return layer_of(hf).rpartition(".")[2]


@lru_cache(maxsize=16)
def adapter_table(arch: ModelArch, role: Role, lora: LoRA) -> Mapping[str, ParameterMapping]:
    """Returns global name -> row of everything trained: adapters, and a critic's value head.

    `ParameterMapping.hf` are PEFT's names without their prefix `base_model.model.`.
    """
    found: dict[str, ParameterMapping] = {}
    for name, row in adapted_rows(arch):
        owner, cut = name.removesuffix(".weight"), row.tp_dim
        for index, (hf, (rows, columns)) in enumerate(zip(row.hf, row.shapes, strict=True)):
            if not lora.adapts(layer_of(hf)):
                continue
            own, theirs = f"{owner}{ADAPTER_INFIX}{part_of(hf)}.", layer_of(hf)
            by_row, by_column = (0 if cut == 0 else None), (1 if cut == 1 else None)
            found[own + "A"] = _row(theirs + ".lora_A.weight", (lora.rank, columns), by_column, row)
            of_rows = {own + "B": _row(theirs + ".lora_B.weight", (rows, lora.rank), by_row, row)}
            if lora.dora:
                of_rows[own + "magnitude"] = _row(theirs + ".lora_magnitude_vector", (rows,), by_row, row)
            if row.groups:  # the layer has its rows by head
                pieces, groups = row.pieces_of(index), row.groups
                of_rows = {
                    name: replace(each, kind="qkv", pieces=pieces, groups=groups) for name, each in of_rows.items()
                }
            found |= of_rows
    if role == "critic":
        found[VALUE_HEAD] = replace(weight_table(arch, role)[VALUE_HEAD], zeros=())  # a bias is for whole models
    return MappingProxyType(found)


def _row(hf: str, shape: tuple[int, ...], tp_dim: int | None, base: ParameterMapping) -> ParameterMapping:
    return ParameterMapping("copy", (hf,), (shape,), tp_dim=tp_dim, expert=base.expert)


def joined_layers(arch: ModelArch, lora: LoRA) -> list[str]:
    """Returns the names, inside their parents, of adapted layers whose weights the hub joins in one tensor.

    Their single adapter would have rows that Megatron keeps in another order.
    """
    rows = [row for _, row in adapted_rows(arch) if row.pieces and not row.groups and lora.adapts(layer_of(row.hf[0]))]
    return list(dict.fromkeys(part_of(row.hf[0]) for row in rows))


def without_layer(arch: ModelArch, lora: LoRA) -> list[str]:
    """Returns the targets that match no linear layer of the model."""
    layers = [layer_of(hf) for _, row in adapted_rows(arch) for hf in row.hf]
    known = {each for each in lora.targets if any(LoRA(1, 1.0, (each,)).adapts(layer) for layer in layers)}
    return [each for each in lora.targets if each not in known]


def adapted_parts(arch: ModelArch, lora: LoRA) -> list[str]:
    """Returns the distinct names, inside their parents, of adapted linear layers and of those that engines join with
    them.
    """
    rows = [row for _, row in adapted_rows(arch) if any(lora.adapts(layer_of(hf)) for hf in row.hf)]
    return list(dict.fromkeys(part_of(hf) for row in rows for hf in row.hf))


def layer_names(arch: ModelArch) -> list[str]:
    """Returns the distinct names, inside their parents, of the model's linear layers."""
    return list(dict.fromkeys(part_of(hf) for _, row in adapted_rows(arch) for hf in row.hf))


def takes_experts(arch: ModelArch, lora: LoRA) -> bool:
    """Returns True if experts have adapters."""
    return any(row.expert and lora.adapts(layer_of(hf)) for _, row in adapted_rows(arch) for hf in row.hf)


def num_trained(arch: ModelArch, role: Role, lora: LoRA) -> int:
    """Returns the number of trained parameters in adapters and a value head, over the whole model."""
    return sum(math.prod(row.shapes[0]) for row in adapter_table(arch, role, lora).values())
