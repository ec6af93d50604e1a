"""Qwen3-MoE: Qwen3's attention, experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.families.experts import ExpertDecoder
from mrl.families.keys import Keys
from mrl.families.qwen3 import Qwen3

_EXPERT = "mlp.experts.{}."


class Qwen3Moe(ExpertDecoder, Qwen3):
    name, architecture = "qwen3_moe", "Qwen3MoeForCausalLM"
    width_key = "moe_intermediate_size"
    engine_score_bias = False  # it serves no such class
    router = "mlp.gate.weight"
    expert_names = (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight", _EXPERT + "down_proj.weight")

    def count_key(self, keys: Keys) -> str:
        return "num_experts" if keys["num_local_experts"] is None else "num_local_experts"

    def normalizes(self, keys: Keys) -> bool:
        return keys.flag("norm_topk_prob", False)

    def differences(self, keys: Keys) -> Iterator[str]:
        yield from super().differences(keys)
        if keys["mlp_only_layers"] or keys.content.get("decoder_sparse_step", 1) != 1:
            yield "dense layers between the expert layers (mlp_only_layers, decoder_sparse_step)"
