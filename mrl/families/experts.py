"""Common base of decoders with experts."""

from __future__ import annotations

from mrl.families.arch import ExpertArch, LayerArch, ModelArch
from mrl.families.decoder import MAX_WIDTH, Decoder
from mrl.families.keys import Keys
from mrl.families.rows import MappingTable, ParameterMapping, dense_mlp, expert_mlps, router_bias

MAX_EXPERTS = 1 << 16
SHARED = "mlp.shared_experts"  # Megatron's name


class ExpertDecoder(Decoder):
    """Experts in every layer. A family whose layers differ overrides `layers`.

    router, router_bias, expert_names: the hub's names in a layer; {} is the expert's number, the order gate, up, down
    shared, shared_gate: names of the shared expert MLP and of its gate
    """

    router: str
    router_bias = "mlp.gate.e_score_correction_bias"
    shared, shared_gate = "mlp.shared_experts", "mlp.shared_expert_gate.weight"
    expert_names: tuple[str, str, str]

    def layers(self, keys: Keys, count: int) -> tuple[LayerArch, ...]:
        return (LayerArch(keys.size(self.width_key, MAX_WIDTH), experts=True),) * count

    def experts(self, keys: Keys) -> ExpertArch | None:
        count = keys.size(self.count_key(keys), MAX_EXPERTS)
        per_token, normalize = keys.size("num_experts_per_tok", count), self.normalizes(keys)
        if per_token == 1 and normalize:
            raise keys.wrong("num_experts_per_tok", "2 or more: a single normalized router weight is always 1")
        return ExpertArch(count, per_token, normalize)

    def count_key(self, keys: Keys) -> str:
        """Returns config.json's key of the number of experts."""
        return "num_local_experts"

    def normalizes(self, keys: Keys) -> bool:
        """Returns True if the chosen experts' weights are scaled to add up to 1."""
        return True

    def ffn_rows(self, arch: ModelArch, layer: LayerArch, m: str, h: str) -> MappingTable:
        if not layer.experts or arch.experts is None:
            return super().ffn_rows(arch, layer, m, h)
        hidden, experts = arch.hidden_size, arch.experts
        rows = expert_mlps(hidden, layer.ffn_size, experts.count, m, h, router=self.router, names=self.expert_names)
        if experts.sigmoid:
            rows |= router_bias(experts.count, m, h + self.router_bias)
        if experts.shared_gate:
            rows[f"{m}{SHARED}.gate_weight"] = ParameterMapping("copy", (h + self.shared_gate,), ((1, hidden),))
        if experts.shared_width:
            rows |= dense_mlp(hidden, experts.shared_width, m, h, (SHARED, self.shared))
        return rows
