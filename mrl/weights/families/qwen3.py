"""Qwen3: Llama with RMSNorm over each query and key head."""

from __future__ import annotations

from mrl.models.arch import ModelArch
from mrl.weights.families.blocks import Rows, attention, dense_mlp, prefixes, qk_norm


def layer(arch: ModelArch, index: int) -> Rows:
    m, h = prefixes(index)
    return {**attention(arch, m, h), **qk_norm(arch, m, h), **dense_mlp(arch, m, h)}
