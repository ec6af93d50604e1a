"""GLM-4.5, 4.6, 4.7 and Air: the plain decoder's attention with partial rotation, and sigmoid experts."""

from __future__ import annotations

from dataclasses import replace

from mrl.families.arch import ModelArch
from mrl.families.keys import Keys
from mrl.families.sigmoid_experts import SigmoidExperts


class Glm4Moe(SigmoidExperts):
    name, architecture = "glm4_moe", "Glm4MoeForCausalLM"
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8}
    rotary_share = 0.5
    ignores_attention_bias = True  # q, k and v have it then, and there is a place for those

    def read(self, keys: Keys) -> ModelArch:
        qk_norm, bias = keys.flag("use_qk_norm", False), keys.flag("attention_bias", False)
        return replace(super().read(keys), qk_norm=qk_norm, qkv_bias=bias)
