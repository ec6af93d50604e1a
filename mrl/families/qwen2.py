"""Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections."""

from __future__ import annotations

from mrl.families.decoder import Decoder


class Qwen2(Decoder):
    name, architecture = "qwen2", "Qwen2ForCausalLM"
    qkv_bias = True
    ignores_attention_bias = True
    engine_score_bias = True
