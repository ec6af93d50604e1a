"""Qwen3.5's text models: gated delta nets, every fourth layer attention; dense, or with experts."""

from __future__ import annotations

from mrl.families.delta_nets import DeltaNetDecoder
from mrl.families.qwen3_next import SharedQwenExperts

PROJECTIONS = (("in_proj_qkv", 3), ("in_proj_z", 1), ("in_proj_b", 1), ("in_proj_a", 1))
DRAFTS = ("mtp_num_hidden_layers",)


class Qwen35Text(DeltaNetDecoder):
    name, architecture = "qwen3_5_text", "Qwen3_5ForCausalLM"
    scorer = "Qwen3_5Text"
    defaults = {"head_dim": 256, "max_position_embeddings": 32768, "num_key_value_heads": 4}
    projections = PROJECTIONS
    draft_keys = DRAFTS


class Qwen35MoeText(SharedQwenExperts):
    name, architecture = "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"
    defaults = {"head_dim": 256, "max_position_embeddings": 32768, "num_key_value_heads": 2}
    projections = PROJECTIONS
    draft_keys = DRAFTS
