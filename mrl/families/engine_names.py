"""What engines call the parameters of the weight table.

SGLang joins q, k, v and gate, up, and the experts of a layer; an engine with transformers' own modules keeps the hub's
names, or those of the joined experts on disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from mrl.families import FAMILIES, ModelArch
from mrl.families.rows import Row
from mrl.families.table import HF_OUTPUT, weight_table

DERIVED = (".rotary_emb.axis_map",)  # ends of names of SGLang's buffers that follow from config.json
VOCAB_MULTIPLE = 64  # SGLang rounds its embedding rows up to this; those beyond the vocabulary are zero
Parameters = Mapping[str, tuple["Source", ...]]


@dataclass(frozen=True)
class Source:
    """The Hugging Face tensor number `index` of a row."""

    row: Row
    index: int

    @property
    def name(self) -> str:
        return self.row.hf[self.index]


@lru_cache(maxsize=4)
def fused_parameters(arch: ModelArch) -> Parameters:
    """SGLang's name of each parameter -> the tensors that lie in it, end to end."""
    found: dict[str, list[Source]] = {}
    for row in weight_table(arch).values():
        found.setdefault(FAMILIES[arch.family].in_engine(_fused_name(row)), []).extend(
            Source(row, i) for i in range(len(row.hf))
        )
    return {name: tuple(sources) for name, sources in found.items()}


@lru_cache(maxsize=4)
def plain_parameters(arch: ModelArch) -> Parameters:
    """The same for engines that keep the hub's names; joined experts stand here as well."""
    found: dict[str, list[Source]] = {}
    for row in weight_table(arch).values():
        for i, name in enumerate(row.hf):
            names = {HF_OUTPUT} if row.copy_of else {name, *(alias.name for alias in row.aliases[i : i + 1])}
            for each in names:
                found.setdefault(each, []).append(Source(row, i))
    return {name: tuple(sources) for name, sources in found.items()}


def taken_at_once(arch: ModelArch) -> Mapping[str, str]:
    """The Hugging Face tensors that SGLang takes only together with others -> the parameter that they are in."""
    joined = [(name, row.joined) for row in weight_table(arch).values() if row.joined for name in row.hf]
    several = {each for each, count in Counter(each for _, each in joined).items() if count > 1}
    return {name: each for name, each in joined if each in several}


def _fused_name(row: Row) -> str:
    first = row.hf[0]
    if row.joined is not None:
        return row.joined
    if row.copy_of:
        return HF_OUTPUT
    if row.expert:
        experts, _, _ = first.partition(".experts.")
        return f"{experts}.experts." + ("w13_weight" if row.kind == "gate_up" else "w2_weight")
    if row.kind == "qkv":
        return first.replace(".q_proj.", ".qkv_proj.")
    return first.replace(".gate_proj.", ".gate_up_proj.") if row.kind == "gate_up" else first
