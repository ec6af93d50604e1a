"""Qwen3-Next: gated delta nets, every fourth layer attention, and experts with a gated shared expert."""

from __future__ import annotations

from dataclasses import replace

from mrl.families.arch import ExpertArch
from mrl.families.decoder import MAX_WIDTH
from mrl.families.delta_nets import DeltaNetDecoder
from mrl.families.keys import Keys
from mrl.families.qwen_experts import QwenExperts


class SharedQwenExperts(DeltaNetDecoder, QwenExperts):
    """Gated delta nets with experts, of Qwen3-Next and Qwen3.5."""

    shared = "mlp.shared_expert"

    def experts(self, keys: Keys) -> ExpertArch | None:
        found = super().experts(keys)
        assert found is not None
        width = keys.size("shared_expert_intermediate_size", MAX_WIDTH, 512)
        return replace(found, shared_width=width, shared_gate=True)

    def normalizes(self, keys: Keys) -> bool:
        return True


class Qwen3Next(SharedQwenExperts):
    name, architecture = "qwen3_next", "Qwen3NextForCausalLM"
    defaults = {"head_dim": 256, "max_position_embeddings": 32768, "num_key_value_heads": 2}
    projections = (("in_proj_qkvz", 4), ("in_proj_ba", 2))
    by_head = True

    def normalizes(self, keys: Keys) -> bool:
        return keys.flag("norm_topk_prob", True)
