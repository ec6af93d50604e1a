"""Phi-4, and Phi-3 without its windows: Llama with joined q/k/v and gate/up projections, and optional partial
rotation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mrl.families.arch import ModelArch
from mrl.families.decoder import Decoder, short_window
from mrl.families.keys import Keys, short
from mrl.families.rope import rope_table
from mrl.families.rows import MappingTable, prefixes


class Phi3(Decoder):
    name, architecture = "phi3", "Phi3ForCausalLM"
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    rotary_share = 1.0
    ignores_attention_bias = True
    ignores_auto_map = True  # the hub's directories bring code of before transformers had the family

    def differences(self, keys: Keys) -> Iterator[str]:
        yield from super().differences(keys)
        yield from short_window(keys)
        for key in ("resid_pdrop", "embd_pdrop"):
            if keys[key]:
                yield f"{key}={short(keys[key])} (only 0)"
        for name in ("rope_parameters", "rope_scaling"):
            rope = keys.table(name)
            if rope is not None and (rope["rope_type"] or rope["type"]) in ("longrope", "su"):
                yield (
                    f"{name}.rope_type=longrope (rotary angles depend on the longest sequence of a batch: use Phi-4 "
                    "14B, which has none)"
                )

    def engine_config(self, keys: Keys) -> Mapping[str, Any]:
        """Returns partial_rotary_factor where SGLang expects it, as on the hub; transformers writes it elsewhere."""
        rope = rope_table(keys)
        share = rope["partial_rotary_factor"] if rope is not None else None
        return {} if share is None else {"partial_rotary_factor": share}

    def layer_rows(self, arch: ModelArch, index: int) -> MappingTable:
        m, h = prefixes(index)
        rows = super().layer_rows(arch, index)
        for own, theirs in (
            ("self_attention.linear_qkv.weight", "self_attn.qkv_proj.weight"),
            ("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight"),
        ):
            rows[m + own] = rows[m + own].in_one(h + theirs)
        return rows

    def engine_lacks(self, arch: ModelArch, tensor: int, *, quantized: bool) -> str | None:
        """A tensor's fp8 scales would cover several projections."""
        return f"does not support fused fp8 projections of {self.name}: leave quantization out" if quantized else None
