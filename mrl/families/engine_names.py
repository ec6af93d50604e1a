"""Engines' names of the parameters in the weight table.

SGLang joins q, k, v and gate, up, and the experts of a layer; an engine with transformers' own modules keeps the hub's
names, or those of the joined experts on disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from mrl.families import FAMILIES, ModelArch
from mrl.families.rows import ParameterMapping
from mrl.families.stacks import slice_of, stored_name
from mrl.families.table import HF_OUTPUT, weight_table

_OF_STACKS = {  # SGLang's names of tensors that the hub has of all experts
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_weight_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_weight_bias",
}
DERIVED = (".rotary_emb.axis_map",)  # ends of names of SGLang's buffers that follow from config.json
VOCAB_MULTIPLE = 64  # SGLang rounds its embedding rows up to this; those beyond the vocabulary are zero
Parameters = Mapping[str, tuple["HubTensor", ...]]


@dataclass(frozen=True)
class HubTensor:
    """Hugging Face tensor number `index` of a row, or the stored tensor that contains it."""

    row: ParameterMapping
    index: int

    @property
    def name(self) -> str:
        return stored_name(self.row.hf[self.index])

    @property
    def is_stack(self) -> bool:
        """True if its first dimension is that of the experts."""
        return slice_of(self.row.hf[self.index]) is not None

    @property
    def is_transposed(self) -> bool:
        """True if SGLang keeps its matrices transposed."""
        return self.is_stack and len(self.row.shapes[self.index]) == 2

    @property
    def is_wide(self) -> bool:
        """True if SGLang keeps it in float32, whatever the model's dtype."""
        return self.is_stack and not self.is_transposed


@lru_cache(maxsize=4)
def fused_parameters(arch: ModelArch) -> Parameters:
    """Returns SGLang's parameter names -> the tensors that are concatenated in each."""
    found: dict[str, list[HubTensor]] = {}
    for row in weight_table(arch).values():
        found.setdefault(FAMILIES[arch.family].in_engine(_fused_name(row)), []).extend(
            HubTensor(row, i) for i in range(len(row.hf)) if _stands_for_all(row.hf[i])
        )
    return {name: tuple(sources) for name, sources in found.items()}


@lru_cache(maxsize=4)
def plain_parameters(arch: ModelArch) -> Parameters:
    """Returns the same for engines that keep the hub's names, including joined experts."""
    found: dict[str, list[HubTensor]] = {}
    for row in weight_table(arch).values():
        for i, name in enumerate(map(stored_name, row.hf)):
            if not _stands_for_all(row.hf[i]):
                continue
            names = {HF_OUTPUT} if row.copy_of else {name, *(alias.name for alias in row.aliases[i : i + 1])}
            for each in names:
                found.setdefault(each, []).append(HubTensor(row, i))
    return {name: tuple(sources) for name, sources in found.items()}


def joined_tensors(arch: ModelArch) -> Mapping[str, str]:
    """Returns Hugging Face tensor -> the joined parameter, for tensors that SGLang loads only together with others."""
    joined = [(name, row.joined) for row in weight_table(arch).values() if row.joined for name in row.hf]
    several = {each for each, count in Counter(each for _, each in joined).items() if count > 1}
    return {name: each for name, each in joined if each in several}


def _stands_for_all(name: str) -> bool:
    """False for a slice of a tensor that another slice is listed for already."""
    found = slice_of(name)
    return found is None or found[1] == 0


def _fused_name(row: ParameterMapping) -> str:
    first = row.hf[0]
    if row.joined is not None:
        return row.joined
    if row.copy_of:
        return HF_OUTPUT
    if row.expert:
        experts, _, own = stored_name(first).partition(".experts.")
        if own in _OF_STACKS:
            return f"{experts}.experts.{_OF_STACKS[own]}"
        return f"{experts}.experts." + ("w13_weight" if row.kind == "gate_up" else "w2_weight")
    if row.kind == "qkv":
        return first.replace(".q_proj.", ".qkv_proj.")
    return first.replace(".gate_proj.", ".gate_up_proj.") if row.kind == "gate_up" else first
