"""Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections."""

from __future__ import annotations

from mrl.families.decoder import Decoder


class Qwen2(Decoder):
    name, architecture = "qwen2", "Qwen2ForCausalLM"
    defaults = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
    qkv_bias = True
    ignores_attention_bias = True
    engine_score_bias = True
