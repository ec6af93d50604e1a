"""Mixtral: Mistral with experts. On the hub w1, w3, w2 are the gate, up and down projections."""

from __future__ import annotations

from mrl.models.arch import ModelArch
from mrl.weights.families.blocks import Rows, attention, moe, prefixes


def _expert(i: int) -> tuple[str, str, str]:
    base = f"block_sparse_moe.experts.{i}."
    return base + "w1.weight", base + "w3.weight", base + "w2.weight"


def layer(arch: ModelArch, index: int) -> Rows:
    m, h = prefixes(index)
    return {**attention(arch, m, h), **moe(arch, m, h, "block_sparse_moe.gate.weight", _expert)}
