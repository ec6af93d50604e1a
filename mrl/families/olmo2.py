"""OLMo 2: norms after attention and MLP instead of before, and q/k norms over all heads together."""

from __future__ import annotations

from dataclasses import replace

from mrl.families.arch import ModelArch
from mrl.families.decoder import Decoder
from mrl.families.rows import MappingTable, norm, prefixes


class Olmo2(Decoder):
    name, architecture = "olmo2", "Olmo2ForCausalLM"
    defaults = {"rms_norm_eps": 1e-5}
    qk_norm = norms_all_heads = norms_behind = wide_norms = True
    norms_before = False
    local_only = "norms over all heads, and after attention and MLP"

    def layer_rows(self, arch: ModelArch, index: int) -> MappingTable:
        (m, h), size = prefixes(index), arch.hidden_size
        rows = super().layer_rows(arch, index)
        for before in ("input_layernorm.weight", "pre_mlp_layernorm.weight"):
            del rows[m + before]
        for x, heads in (("q", arch.num_heads), ("k", arch.num_kv_heads)):
            name = f"{h}self_attn.{x}_norm.weight"
            own = replace(norm(name, heads * arch.head_dim), tp_dim=0, joined=name)  # which engines do not cut
            rows[f"{m}self_attention.{x}_layernorm.weight"] = own
        return rows | {
            m + "self_attn_bda.norm.weight": norm(h + "post_attention_layernorm.weight", size),
            m + "mlp_bda.norm.weight": norm(h + "post_feedforward_layernorm.weight", size),
        }

    def engine_lacks(self, arch: ModelArch, tensor: int, *, quantized: bool) -> str | None:
        """SGLang norms the keys of all ranks together, including heads that several ranks hold."""
        if tensor <= arch.num_kv_heads:
            return None
        return f"needs a key-value head of {self.name} for each rank: set rollout.tensor to {arch.num_kv_heads} or less"
