"""Qwen3: Llama with RMSNorm over each query and key head."""

from __future__ import annotations

from mrl.families.decoder import Decoder


class Qwen3(Decoder):
    name, architecture = "qwen3", "Qwen3ForCausalLM"
    defaults = {"head_dim": 128, "max_position_embeddings": 32768, "num_key_value_heads": 32}
    qk_norm = True
    engine_score_bias = True
