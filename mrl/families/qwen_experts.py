"""Common base of Qwen2-MoE and Qwen3-MoE: experts in every n-th layer, except in named dense layers."""

from __future__ import annotations

from mrl.families.arch import LayerArch, ModelArch
from mrl.families.decoder import MAX_LAYERS, MAX_WIDTH
from mrl.families.experts import ExpertDecoder
from mrl.families.keys import Keys

_EXPERT = "mlp.experts.{}."


class QwenExperts(ExpertDecoder):
    width_key = "moe_intermediate_size"
    router = "mlp.gate.weight"
    expert_names = (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight", _EXPERT + "down_proj.weight")

    def layers(self, keys: Keys, count: int) -> tuple[LayerArch, ...]:
        step, dense = keys.size("decoder_sparse_step", MAX_LAYERS, 1), keys["mlp_only_layers"] or []
        if not isinstance(dense, list) or any(type(index) is not int or not 0 <= index < count for index in dense):
            raise keys.wrong("mlp_only_layers", f"layers from 0 to {count - 1}")
        have = [(index + 1) % step == 0 and index not in dense for index in range(count)]
        experts = LayerArch(keys.size(self.width_key, MAX_WIDTH), experts=True)
        wide = experts if all(have) else LayerArch(keys.size("intermediate_size", MAX_WIDTH))
        return tuple(experts if has else wide for has in have)

    def count_key(self, keys: Keys) -> str:
        return "num_experts" if keys["num_local_experts"] is None else "num_local_experts"

    def normalizes(self, keys: Keys) -> bool:
        return keys.flag("norm_topk_prob", False)

    def engine_lacks(self, arch: ModelArch, tensor: int, *, quantized: bool) -> str | None:
        """SGLang reads neither `mlp_only_layers` nor `decoder_sparse_step`."""
        if not arch.layers_differ:
            return None
        return f"assumes experts in all layers of {self.name}: set rollout.engine: transformers"
