"""Qwen3-MoE: Qwen3's attention with experts."""

from __future__ import annotations

from mrl.families.qwen3 import Qwen3
from mrl.families.qwen_experts import QwenExperts


class Qwen3Moe(QwenExperts, Qwen3):
    name, architecture = "qwen3_moe", "Qwen3MoeForCausalLM"
    defaults = {"max_position_embeddings": 32768, "num_key_value_heads": 4}
    engine_score_bias = False  # it serves no such class
