"""gpt-oss: alternating sliding-window and full attention layers with attention sinks; clamped experts with biases."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.families.arch import LayerArch, ModelArch
from mrl.families.decoder import MAX_POSITIONS, MAX_WIDTH
from mrl.families.experts import ExpertDecoder
from mrl.families.keys import Keys, short
from mrl.families.rope import FULL, YARN, refuse_rope
from mrl.families.rows import MappingTable, ParameterMapping, prefixes
from mrl.families.sliding import SlidingDecoder
from mrl.families.stacks import stacked_experts

PATTERN, WINDOW = 2, 128  # where config.json has none
GATE = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # SHARPNESS, LIMIT of mrl.kernels.layers


class GptOss(ExpertDecoder, SlidingDecoder):
    name, architecture = "gpt_oss", "GptOssForCausalLM"
    defaults = {"rms_norm_eps": 1e-5, "head_dim": 64, "max_position_embeddings": 131072, "num_key_value_heads": 8}
    qkv_bias = True
    wide_norms = sinks = biases = True
    gate = "clamped"
    local_only = "attention sinks, windows that differ by layer, and clamped experts with biases"
    unpacks = ("mxfp4",)
    ignores_attention_bias = True  # there is a place for all four
    engine_score_bias = False  # it serves no such class
    engine_needs_gpu = "has no attention with sinks on CPUs (no CPU backend for this family)"

    def engine_lacks(self, arch: ModelArch, tensor: int, *, quantized: bool) -> str | None:
        """Returns why fp8 is not supported: the experts' tensors are sent whole, without scales."""
        return f"does not support fp8 experts of {self.name}: leave quantization out" if quantized else None

    def layers(self, keys: Keys, count: int) -> tuple[LayerArch, ...]:
        width, window = keys.size(self.width_key, MAX_WIDTH), keys.size("sliding_window", MAX_POSITIONS, WINDOW)
        full, sliding = LayerArch(width, experts=True), LayerArch(width, experts=True, window=window)
        return tuple(full if kind == FULL else sliding for kind in self._kinds(keys, count))

    def pattern(self, keys: Keys) -> int:
        return PATTERN

    def check_rope(self, keys: Keys) -> None:
        refuse_rope(keys, types=YARN)

    def differences(self, keys: Keys) -> Iterator[str]:
        yield from super().differences(keys)
        if not keys.flag("attention_bias", True):
            yield "attention_bias=false (its projections have biases)"
        if keys.content.get("sliding_window", WINDOW) is None:
            yield "sliding_window=null (sliding layers need one)"
        for key, usual in GATE.items():
            if keys.number(key, usual, 0.0, 1e9) != usual:
                yield f"{key}={short(keys[key])} (only {usual})"

    def layer_rows(self, arch: ModelArch, index: int) -> MappingTable:
        (m, h), rows = prefixes(index), super().layer_rows(arch, index)
        sinks, bias = m + "self_attention.core_attention.softmax_offset", m + "self_attention.linear_proj.bias"
        rows[sinks] = ParameterMapping("copy", (h + "self_attn.sinks",), ((arch.num_heads,),), tp_dim=0, start="zeros")
        rows[bias] = ParameterMapping("copy", (h + "self_attn.o_proj.bias",), ((arch.hidden_size,),), start="zeros")
        return rows

    def ffn_rows(self, arch: ModelArch, layer: LayerArch, m: str, h: str) -> MappingTable:
        assert arch.experts is not None
        count, hidden = arch.experts.count, arch.hidden_size
        router = {
            m + "mlp.router.weight": ParameterMapping("copy", (h + "mlp.router.weight",), ((count, hidden),)),
            m + "mlp.router.bias": ParameterMapping("copy", (h + "mlp.router.bias",), ((count,),), start="zeros"),
        }
        return router | stacked_experts(hidden, layer.ffn_size, count, m, h)
