"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, experts, and a gated shared expert."""

from __future__ import annotations

from dataclasses import replace

from mrl.families.arch import ExpertArch, ModelArch
from mrl.families.decoder import MAX_WIDTH
from mrl.families.keys import Keys
from mrl.families.qwen2 import Qwen2
from mrl.families.qwen_experts import QwenExperts


class Qwen2Moe(QwenExperts, Qwen2):
    name, architecture = "qwen2_moe", "Qwen2MoeForCausalLM"
    defaults = {"max_position_embeddings": 32768, "num_key_value_heads": 16}
    engine_score_bias = False  # it serves no such class
    shared = "mlp.shared_expert"

    def read(self, keys: Keys) -> ModelArch:
        return replace(super().read(keys), qkv_bias=keys.flag("qkv_bias", True))

    def experts(self, keys: Keys) -> ExpertArch | None:
        found = super().experts(keys)
        assert found is not None
        width = keys.size("shared_expert_intermediate_size", MAX_WIDTH, 5632)
        return replace(found, shared_width=width, shared_gate=True)
