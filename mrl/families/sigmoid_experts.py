"""What GLM-4.5 and DeepSeek-V3 share: dense layers first, then experts with a biased sigmoid router and a shared
expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mrl import float32
from mrl.families.arch import Experts, Layer
from mrl.families.decoder import MAX_WIDTH
from mrl.families.experts import MAX_EXPERTS, ExpertDecoder
from mrl.families.keys import Keys

_EXPERT = "mlp.experts.{}."
MAX_SHARED = 1 << 10


class SigmoidExperts(ExpertDecoder):
    """dense_first, scale, groups, per_token_groups: where config.json has none."""

    width_key = "moe_intermediate_size"
    router = "mlp.gate.weight"
    expert_names = (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight", _EXPERT + "down_proj.weight")
    draft_keys = ("num_nextn_predict_layers", "num_mtp_layers")
    dense_first, scale, groups, per_token_groups = 1, 1.0, 1, 1

    def layers(self, keys: Keys, count: int) -> tuple[Layer, ...]:
        dense = keys.content.get("first_k_dense_replace", self.dense_first)
        if type(dense) is not int or not 0 <= dense < count:
            raise keys.wrong("first_k_dense_replace", f"a whole number below num_hidden_layers ({count})")
        wide = (Layer(keys.size("intermediate_size", MAX_WIDTH)),) * dense
        return wide + (Layer(keys.size(self.width_key, MAX_WIDTH), experts=True),) * (count - dense)

    def count_key(self, keys: Keys) -> str:
        return "n_routed_experts" if keys["num_local_experts"] is None else "num_local_experts"

    def experts(self, keys: Keys) -> Experts | None:
        found = super().experts(keys)
        assert found is not None
        groups, chosen = self._groups(keys)
        return replace(
            found,
            sigmoid=True,
            scale=keys.number("routed_scaling_factor", self.scale, float32.TINY, 1e3),
            groups=groups,
            per_token_groups=chosen,
            shared_width=keys.size("n_shared_experts", MAX_SHARED, 1) * keys.size(self.width_key, MAX_WIDTH),
        )

    def differences(self, keys: Keys) -> Iterator[str]:
        """Megatron scores a group by its best num_experts_per_tok / topk_group experts, transformers and engines by
        two."""
        yield from super().differences(keys)
        if not keys.flag("norm_topk_prob", True):
            yield "norm_topk_prob=false (Megatron scales the weights of a sigmoid router)"
        (groups, chosen), per_token = self._groups(keys), keys.size("num_experts_per_tok", MAX_EXPERTS)
        if groups > 1 and per_token != 2 * chosen:
            yield f"n_group={groups} with num_experts_per_tok={per_token} other than twice topk_group={chosen}"

    def _groups(self, keys: Keys) -> tuple[int, int]:
        """(groups of experts, those of a token)."""
        groups = keys.size("n_group", MAX_EXPERTS, self.groups)
        return groups, keys.size("topk_group", groups, self.per_token_groups)
