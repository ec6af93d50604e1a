"""DeepSeek-V3 and R1, Moonlight, Kimi-K2: multi-head latent attention and sigmoid experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mrl import float32
from mrl.families.arch import LatentAttentionArch, ModelArch
from mrl.families.decoder import MAX_WIDTH
from mrl.families.keys import Keys, UnsupportedModel, short
from mrl.families.rope import YARN, refuse_rope, rope_table
from mrl.families.rows import MappingTable, latent_attention, prefixes
from mrl.families.sigmoid_experts import SigmoidExperts

USUAL = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_interleave": True}


class DeepseekV3(SigmoidExperts):
    name, architecture = "deepseek_v3", "DeepseekV3ForCausalLM"
    defaults = {
        "first_k_dense_replace": 3,
        "max_position_embeddings": 4096,
        "n_group": 8,
        "num_key_value_heads": 128,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    }
    local_only = "multi-head latent attention"
    ignores_auto_map = True  # the hub's directories bring code of before transformers had the family

    def read(self, keys: Keys) -> ModelArch:
        heads = keys.size("num_attention_heads", MAX_WIDTH)
        has_rank = keys.content.get("q_lora_rank", 0) is not None
        latent = LatentAttentionArch(
            query_rank=keys.size("q_lora_rank", MAX_WIDTH, 1536) if has_rank else None,
            rank=keys.size("kv_lora_rank", MAX_WIDTH, 512),
            plain=keys.size("qk_nope_head_dim", MAX_WIDTH, 128),
            turned=keys.size("qk_rope_head_dim", MAX_WIDTH, 64),
            value=keys.size("v_head_dim", MAX_WIDTH, 128),
        )
        if latent.turned % 2:
            raise keys.wrong("qk_rope_head_dim", "even, since rotary embeddings rotate pairs of channels")
        if keys.size("num_key_value_heads", MAX_WIDTH, heads) != heads:
            raise keys.wrong("num_key_value_heads", f"num_attention_heads ({heads})")
        width = latent.plain + latent.turned
        plain = super().read(Keys(keys.content | {"head_dim": width + width % 2}, keys.where))
        return replace(
            plain, head_dim=width, rotary_dim=latent.turned, latent=latent, attention_scale=_scale(keys, width)
        )

    def check_rope(self, keys: Keys) -> None:
        refuse_rope(keys, types=YARN)

    def differences(self, keys: Keys) -> Iterator[str]:
        yield from super().differences(keys)
        for key, usual in USUAL.items():
            if keys.content.get(key, usual) != usual:
                yield f"{key}={short(keys[key])} (only {usual})"

    def engine_config(self, keys: Keys) -> Mapping[str, Any]:
        """Returns keys that SGLang requires and transformers omits when it writes a config.json."""
        return {name: value for name, value in USUAL.items() if name != "rope_interleave"}

    def layer_rows(self, arch: ModelArch, index: int) -> MappingTable:
        m, h = prefixes(index)
        return {**latent_attention(arch, m, h), **self.ffn_rows(arch, arch.layers[index], m, h)}


def _scale(keys: Keys, width: int) -> float | None:
    """Attention scale; yarn adds the logarithm of the context extension factor."""
    rope = rope_table(keys)
    if rope is None or (rope["rope_type"] or rope["type"]) != "yarn":
        return None
    factor = rope.number("factor", None, 1.0, float32.MAX)
    sharper = 0.1 * rope.number("mscale_all_dim", 0.0, 0.0, 1e3) * math.log(factor) + 1.0
    if not math.isfinite(sharper):
        raise UnsupportedModel(f"{rope.where}: factor={factor} is out of range")
    return width**-0.5 * sharper**2
