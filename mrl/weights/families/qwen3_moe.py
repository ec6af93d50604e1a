"""Qwen3-MoE: Qwen3's attention, experts in every layer."""

from __future__ import annotations

from mrl.models.arch import ModelArch
from mrl.weights.families.blocks import Rows, attention, moe, prefixes, qk_norm


def _expert(i: int) -> tuple[str, str, str]:
    base = f"mlp.experts.{i}."
    return base + "gate_proj.weight", base + "up_proj.weight", base + "down_proj.weight"


def layer(arch: ModelArch, index: int) -> Rows:
    m, h = prefixes(index)
    return {
        **attention(arch, m, h),
        **qk_norm(arch, m, h),
        **moe(arch, m, h, "mlp.gate.weight", _expert),
    }
