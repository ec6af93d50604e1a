"""Llama and Mistral: the plain pre-norm decoder with grouped-query attention and a gated MLP."""

from __future__ import annotations

from mrl.models.arch import ModelArch
from mrl.weights.families.blocks import Rows, attention, dense_mlp, prefixes


def layer(arch: ModelArch, index: int) -> Rows:
    m, h = prefixes(index)
    return {**attention(arch, m, h), **dense_mlp(arch, m, h)}
