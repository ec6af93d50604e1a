"""Low-rank adapters (LoRA, arXiv 2106.09685) of a model: which of its linear layers have one, and of what shapes.

A layer's weight W [out, in] becomes W + scale * B A, with A [rank, in] and B [out, rank]. Every linear layer of the
hub's has its own, also where Megatron joins several in one parameter: that is what PEFT and engines know. With DoRA
(arXiv 2402.09353) each row of that sum is scaled to a length of its own, `magnitude`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from mrl.families.arch import ModelArch
from mrl.families.rows import Row
from mrl.families.table import VALUE_HEAD, Role, weight_table

ALL_LINEAR = "all-linear"  # every linear layer of the decoder: not the embedding, the output layer or a router
MARK = ".lora."  # in the global names of adapters, and of nothing else


@dataclass(frozen=True)
class LoRA:
    """targets: the hub's names of linear layers, whole or from a dot on, or `ALL_LINEAR`"""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False
    dora: bool = False

    @property
    def scale(self) -> float:
        """Of B A: alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def takes(self, layer: str) -> bool:
        """Whether the linear layer that the hub calls so has an adapter."""
        return any(each == ALL_LINEAR or f".{layer}".endswith(f".{each}") for each in self.targets)

    def record(self) -> dict[str, Any]:
        """In values that JSON keeps."""
        return {**vars(self), "targets": list(self.targets)}


def lora_of(record: Mapping[str, Any]) -> LoRA:
    """What `LoRA.record` was made of, among other keys. Raises ValueError for what no record holds."""
    kinds = {"rank": int, "alpha": float, "targets": list, "rslora": bool, "dora": bool}
    if any(not isinstance(record.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"adapters are recorded as {str(dict(record))[:120]}, not by {', '.join(kinds)}")
    return LoRA(record["rank"], record["alpha"], tuple(record["targets"]), record["rslora"], record["dora"])


def is_adapter(name: str) -> bool:
    """Whether a parameter of this global name is an adapter's."""
    return MARK in name


def adapted_rows(arch: ModelArch) -> Iterator[tuple[str, Row]]:
    """(global name, row) of the decoder's linear layers, which may have adapters."""
    for name, row in weight_table(arch).items():
        is_cut_matrix = row.tp_dim is not None and all(len(shape) == 2 for shape in row.shapes)
        if name.startswith("decoder.layers.") and is_cut_matrix:
            yield name, row


def layer_of(hf: str) -> str:
    """The linear layer's name, of its weight's."""
    return hf.removesuffix(".weight")


def part_of(hf: str) -> str:
    """What it is called inside of its parent: q_proj."""
    return layer_of(hf).rpartition(".")[2]


@lru_cache(maxsize=16)
def adapter_table(arch: ModelArch, role: Role, lora: LoRA) -> Mapping[str, Row]:
    """Global name -> row of all that is trained: adapters, and a critic's value head. `Row.hf` are PEFT's names without
    their prefix `base_model.model.`"""
    found: dict[str, Row] = {}
    for name, row in adapted_rows(arch):
        owner, cut = name.removesuffix(".weight"), row.tp_dim
        for hf, (rows, columns) in zip(row.hf, row.shapes, strict=True):
            if not lora.takes(layer_of(hf)):
                continue
            own, theirs = f"{owner}{MARK}{part_of(hf)}.", layer_of(hf)
            by_row, by_column = (0 if cut == 0 else None), (1 if cut == 1 else None)
            found[own + "A"] = _row(theirs + ".lora_A.weight", (lora.rank, columns), by_column, row)
            found[own + "B"] = _row(theirs + ".lora_B.weight", (rows, lora.rank), by_row, row)
            if lora.dora:
                found[own + "magnitude"] = _row(theirs + ".lora_magnitude_vector", (rows,), by_row, row)
    if role == "critic":
        found[VALUE_HEAD] = replace(weight_table(arch, role)[VALUE_HEAD], zeros=())  # a bias is for whole models
    return MappingProxyType(found)


def _row(hf: str, shape: tuple[int, ...], tp_dim: int | None, base: Row) -> Row:
    return Row("copy", (hf,), (shape,), tp_dim=tp_dim, expert=base.expert)


def joined_layers(arch: ModelArch, lora: LoRA) -> list[str]:
    """What the layers with adapters are called inside of their parents whose weights the hub has in one tensor: their
    one adapter would be of rows that Megatron keeps in another order."""
    rows = [row for _, row in adapted_rows(arch) if row.pieces and lora.takes(layer_of(row.hf[0]))]
    return list(dict.fromkeys(part_of(row.hf[0]) for row in rows))


def without_layer(arch: ModelArch, lora: LoRA) -> list[str]:
    """Targets that no linear layer of the model is called."""
    layers = [layer_of(hf) for _, row in adapted_rows(arch) for hf in row.hf]
    known = {each for each in lora.targets if any(LoRA(1, 1.0, (each,)).takes(layer) for layer in layers)}
    return [each for each in lora.targets if each not in known]


def adapted_parts(arch: ModelArch, lora: LoRA) -> list[str]:
    """What the linear layers with adapters are called inside of their parents, each once, and those that engines join
    them with."""
    rows = [row for _, row in adapted_rows(arch) if any(lora.takes(layer_of(hf)) for hf in row.hf)]
    return list(dict.fromkeys(part_of(hf) for row in rows for hf in row.hf))


def layer_names(arch: ModelArch) -> list[str]:
    """What the model's linear layers are called inside of their parents, each once."""
    return list(dict.fromkeys(part_of(hf) for _, row in adapted_rows(arch) for hf in row.hf))


def takes_experts(arch: ModelArch, lora: LoRA) -> bool:
    """Whether experts have adapters."""
    return any(row.expert and lora.takes(layer_of(hf)) for _, row in adapted_rows(arch) for hf in row.hf)


def num_trained(arch: ModelArch, role: Role, lora: LoRA) -> int:
    """Numbers in adapters and a value head, over the whole model."""
    return sum(math.prod(row.shapes[0]) for row in adapter_table(arch, role, lora).values())
