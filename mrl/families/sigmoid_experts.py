"""Common base of GLM-4.5 and DeepSeek-V3: dense layers first, then experts with a biased sigmoid router and a shared
expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mrl import float32
from mrl.families.arch import ExpertArch, LayerArch
from mrl.families.decoder import MAX_WIDTH
from mrl.families.experts import MAX_EXPERTS, ExpertDecoder
from mrl.families.keys import Keys

_EXPERT = "mlp.experts.{}."
MAX_SHARED = 1 << 10


class SigmoidExperts(ExpertDecoder):
    width_key = "moe_intermediate_size"
    router = "mlp.gate.weight"
    expert_names = (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight", _EXPERT + "down_proj.weight")
    draft_keys = ("num_nextn_predict_layers", "num_mtp_layers")

    def layers(self, keys: Keys, count: int) -> tuple[LayerArch, ...]:
        dense = keys.content.get("first_k_dense_replace", 1)
        if type(dense) is not int or not 0 <= dense < count:
            raise keys.wrong("first_k_dense_replace", f"an integer below num_hidden_layers ({count})")
        wide = (LayerArch(keys.size("intermediate_size", MAX_WIDTH)),) * dense
        return wide + (LayerArch(keys.size(self.width_key, MAX_WIDTH), experts=True),) * (count - dense)

    def count_key(self, keys: Keys) -> str:
        return "n_routed_experts" if keys["num_local_experts"] is None else "num_local_experts"

    def experts(self, keys: Keys) -> ExpertArch | None:
        found = super().experts(keys)
        assert found is not None
        groups, chosen = self._groups(keys)
        return replace(
            found,
            sigmoid=True,
            scale=keys.number("routed_scaling_factor", 1.0, float32.TINY, 1e3),
            groups=groups,
            per_token_groups=chosen,
            shared_width=keys.size("n_shared_experts", MAX_SHARED, 1) * keys.size(self.width_key, MAX_WIDTH),
        )

    def differences(self, keys: Keys) -> Iterator[str]:
        """Yields differences; Megatron scores a group by its best num_experts_per_tok / topk_group experts,
        transformers by two.
        """
        yield from super().differences(keys)
        if not keys.flag("norm_topk_prob", "norm_topk_prob" not in keys.content):  # null is false in transformers
            yield "norm_topk_prob=false (Megatron normalizes the weights of a sigmoid router)"
        count, per_token = (keys.size(key, MAX_EXPERTS) for key in (self.count_key(keys), "num_experts_per_tok"))
        groups, chosen = self._groups(keys)
        if groups > 1 and (count % groups or count < 2 * groups):
            yield f"n_group={groups} (must divide {self.count_key(keys)}={count} into groups of 2 or more)"
        if groups > 1 and per_token != 2 * chosen:
            yield f"n_group={groups} with num_experts_per_tok={per_token}, which must be twice topk_group={chosen}"

    def _groups(self, keys: Keys) -> tuple[int, int]:
        """(number of expert groups, number of a token's groups)."""
        groups = keys.size("n_group", MAX_EXPERTS, 1)
        return groups, keys.size("topk_group", groups, 1)
