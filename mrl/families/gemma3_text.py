"""Gemma 3 text models: sliding-window and full attention layers with separate rotary angles, norms before and after
attention and MLP, and a scaled embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mrl import float32
from mrl.families.arch import ModelArch
from mrl.families.decoder import MAX_LAYERS
from mrl.families.keys import Keys, short
from mrl.families.rows import MappingTable, norm, prefixes
from mrl.families.sliding import SlidingDecoder

PATTERN, SCALAR = 6, 256.0  # where config.json has none


class Gemma3Text(SlidingDecoder):
    name, architecture = "gemma3_text", "Gemma3ForCausalLM"
    scorer = "Gemma3Text"
    defaults = {
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    }
    qk_norm = True
    activation_key, activation = "hidden_activation", "gelu_pytorch_tanh"
    shifted_norms = norms_behind = scaled_embedding = True
    local_only = "windows and rotary embeddings that differ by layer"
    engine_cuts_vocab = False

    def read(self, keys: Keys) -> ModelArch:
        scalar = keys.number("query_pre_attn_scalar", SCALAR, float32.TINY, float32.MAX)
        return replace(super().read(keys), attention_scale=scalar**-0.5)

    def pattern(self, keys: Keys) -> int:
        return keys.size("sliding_window_pattern", MAX_LAYERS, PATTERN)

    def differences(self, keys: Keys) -> Iterator[str]:
        yield from super().differences(keys)
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if keys[key] is not None:
                yield f"{key}={short(keys[key])} (only unmodified logits)"
        if keys["use_bidirectional_attention"]:
            yield "use_bidirectional_attention=true (only causal attention)"

    def layer_rows(self, arch: ModelArch, index: int) -> MappingTable:
        (m, h), size = prefixes(index), arch.hidden_size
        return super().layer_rows(arch, index) | {
            m + "self_attn_bda.norm.weight": norm(h + "post_attention_layernorm.weight", size),
            m + "pre_mlp_layernorm.weight": norm(h + "pre_feedforward_layernorm.weight", size),
            m + "mlp_bda.norm.weight": norm(h + "post_feedforward_layernorm.weight", size),
        }
