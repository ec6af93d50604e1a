"""Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections."""

from __future__ import annotations

from mrl.models.arch import ModelArch
from mrl.weights.families.blocks import Rows, attention, dense_mlp, prefixes, qkv_bias


def layer(arch: ModelArch, index: int) -> Rows:
    m, h = prefixes(index)
    return {**attention(arch, m, h), **qkv_bias(arch, m, h), **dense_mlp(arch, m, h)}
