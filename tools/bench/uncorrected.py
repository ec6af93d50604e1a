"""GRPO that cancels `rollout_correction`, for a comparison with training on uncorrected off-policy samples."""

from __future__ import annotations

from torch import Tensor

from mrl.algo.advantages import AdvantageInputs
from mrl.algo.group_advantages import grpo


def uncorrected(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Returns GRPO's advantages divided by the weights of `rollout_correction`, and returns, [batch, response_len].

    The policy loss is multiplied by these weights, and a token's clipped loss is proportional to its advantage, so the
    weights cancel. They are positive if they are truncated only from above (TIS).
    """
    advantages, returns = grpo(inputs, norm_adv_by_std_in_grpo=True)
    weights = inputs.importance_weights
    return (advantages if weights is None else advantages / weights.where(inputs.mask, 1.0)), returns
