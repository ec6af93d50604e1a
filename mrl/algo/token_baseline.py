"""Estimators with a separate baseline for every token of a group: no critic, only the policy's probabilities.

Both weigh a response's reward-to-go at its t-th token by W_t, the sum up to t of 1 - 2 pi + sum pi^2: the squared
norm of the gradient of a token's log-prob with respect to the logits. The baseline with the smallest variance of the
gradient is then B_t = sum_G(G_t W_t) / sum_G(W_t) (arXiv 2602.07078). Where the policy loss is multiplied by
importance weights, each token's term of W_t is multiplied by its weight squared, as in verl.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algo.advantages import ESTIMATORS, AdvantageInputs, reward_to_go

WEIGHT_EPS = 1e-8


@ESTIMATORS.register("optimal_token_baseline")
def optimal_token_baseline(inputs: AdvantageInputs, zero_tail: bool | None) -> tuple[Tensor, Tensor]:
    """Reward-to-go minus the group's B_t at the same column t. returns: the reward-to-go.

    Neither discounted nor whitened; a group of one has no baseline. Where only one response of a group is left, its
    baseline is its own return and the advantage 0; with `zero_tail` the baseline is 0 there and the advantage the
    return (verl's handle_zero_tail). Same as verl's, except that weights made negative by rounding are 0.
    """
    returns, weights = reward_to_go(inputs).double(), _realised_energy(inputs)
    return _minus_baseline(inputs, returns, weights, inputs.mask, zero_tail=bool(zero_tail))


@ESTIMATORS.register("tir_optimal_token_baseline")
def tir_optimal_token_baseline(inputs: AdvantageInputs, zero_tail: bool | None) -> tuple[Tensor, Tensor]:
    """optimal_token_baseline for responses with observations: t counts the response's own tokens only.

    As in verl, the part of a group's longest response that no other response reaches has no baseline unless `zero_tail`
    is False: its advantage is its return.
    """
    mask, length = inputs.mask, inputs.mask.sum(1, keepdim=True)
    closed = torch.arange(mask.shape[1], device=mask.device) < length

    def close(values: Tensor) -> Tensor:
        return torch.zeros_like(values).masked_scatter_(closed, values[mask])

    returns = reward_to_go(inputs).double()
    without = zero_tail is not False
    advantages, _ = _minus_baseline(inputs, close(returns), close(_realised_energy(inputs)), closed, without)
    opened = torch.zeros_like(advantages).masked_scatter_(mask, advantages[closed])
    return opened, returns.to(inputs.token_rewards.dtype)


def _minus_baseline(
    inputs: AdvantageInputs, returns: Tensor, weights: Tensor, mask: Tensor, zero_tail: bool
) -> tuple[Tensor, Tensor]:
    """Returns (advantages, returns) in the rewards' dtype. zero_tail: no baseline where one response of a group is
    left.
    """
    weights = weights.masked_fill(~mask, 0)
    baseline = _group_sum(inputs, returns * weights) / (_group_sum(inputs, weights) + WEIGHT_EPS)
    without = _group_sum(inputs, torch.ones_like(returns[:, :1])) == 1
    if zero_tail:
        without = without | (_group_sum(inputs, mask.double()) == 1)
    baseline = baseline.masked_fill(without, 0)
    dtype = inputs.token_rewards.dtype
    return (returns - baseline).masked_fill(~mask, 0).to(dtype), returns.to(dtype)


def _realised_energy(inputs: AdvantageInputs) -> Tensor:
    """Returns W, [B, T] float64."""
    if inputs.log_probs is None or inputs.sum_pi_squared is None:
        raise ValueError("the optimal token baselines need log_probs and sum_pi_squared of the policy")
    energy = 1 - 2 * inputs.log_probs.double().exp() + inputs.sum_pi_squared.double()
    if inputs.importance_weights is not None:
        energy = energy * inputs.importance_weights.double().square()
    return energy.clamp(min=0).masked_fill(~inputs.mask, 0).cumsum(1)


def _group_sum(inputs: AdvantageInputs, values: Tensor) -> Tensor:
    """Returns each response's sums of `values` [B, T] over its group, column by column."""
    numbers, member = inputs.group.unique(return_inverse=True)
    return values.new_zeros(numbers.numel(), values.shape[1]).index_add_(0, member, values)[member]
