"""GRPO that takes back what `rollout_correction` does: for a comparison with learning from old samples as they are."""

from __future__ import annotations

from torch import Tensor

from mrl.algo.advantages import AdvantageInputs
from mrl.algo.group_advantages import grpo


def uncorrected(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of grpo, [B, T], the advantages divided by the weights of `rollout_correction`.

    The policy loss is multiplied by these, and the clipped loss of a token is proportional to the size of its
    advantage: they cancel. They are above 0 where they are cut from above alone (TIS)."""
    advantages, returns = grpo(inputs, norm_adv_by_std_in_grpo=True)
    weights = inputs.importance_weights
    return (advantages if weights is None else advantages / weights.where(inputs.mask, 1.0)), returns
