"""Qwen3: Llama with RMSNorm over each query and key head."""

from __future__ import annotations

from mrl.families.decoder import Decoder


class Qwen3(Decoder):
    name, architecture = "qwen3", "Qwen3ForCausalLM"
    head_dim = 128
    qk_norm = True
    engine_score_bias = True
