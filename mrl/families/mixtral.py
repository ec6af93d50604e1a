"""Mixtral: Mistral with experts. On the hub w1, w3, w2 are the gate, up and down projections."""

from __future__ import annotations

from mrl.families.experts import ExpertDecoder
from mrl.families.mistral import Mistral

_EXPERT = "block_sparse_moe.experts.{}."


class Mixtral(ExpertDecoder, Mistral):
    name, architecture = "mixtral", "MixtralForCausalLM"
    defaults = Mistral.defaults | {"rms_norm_eps": 1e-5, "sliding_window": None}
    router = "block_sparse_moe.gate.weight"
    expert_names = (_EXPERT + "w1.weight", _EXPERT + "w3.weight", _EXPERT + "w2.weight")
