"""Advantage estimators by name.

Tensors are dense [B, T]: one row a response, `response_mask` True on the tokens the policy chose. Masks may have holes
(observations between turns) and rows may be empty. Everything an estimator needs to know about groups is in `group`,
so call it with the whole global batch. Advantages and returns are 0 outside the mask (verl's gae leaves whitened
values there).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algo.registry import Registry
from mrl.algo.scan import discounted_suffix_sum
from mrl.algo.stats import check_same_shape, whiten


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may use; see `compute` for the shapes. `mask` is bool."""

    token_rewards: Tensor
    values: Tensor | None
    mask: Tensor
    group: Tensor
    greedy_scores: Tensor | None
    score_parts: Tensor | None
    part_weights: tuple[float, ...] | None
    log_probs: Tensor | None
    sum_pi_squared: Tensor | None
    importance_weights: Tensor | None
    gamma: float
    lam: float
    norm_adv_by_std_in_grpo: bool
    whiten: bool
    shift_mean: bool
    f_norm: float
    zero_tail: bool | None

    def whitened(self, advantages: Tensor) -> Tensor:
        """Whitened over the mask, where that is not switched off."""
        return whiten(advantages, self.mask, self.shift_mean) if self.whiten else advantages


Estimator = Callable[[AdvantageInputs], tuple[Tensor, Tensor]]
ESTIMATORS: Registry[Estimator] = Registry("advantage estimator")


def compute(
    name: str,
    *,
    token_rewards: Tensor,
    response_mask: Tensor,
    group: Tensor,
    values: Tensor | None = None,
    greedy_scores: Tensor | None = None,
    score_parts: Tensor | None = None,
    part_weights: tuple[float, ...] | None = None,
    log_probs: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    importance_weights: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    whiten: bool = True,
    shift_mean: bool = True,
    f_norm: float = 1.0,
    zero_tail: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages [B, T], returns [B, T]) by the estimator called `name`.

    token_rewards [B, T] floating point: the score on a response's last token, plus per-token terms such as -beta * KL
    response_mask [B, T] bool or 0/1
    group [B] int64: responses to one prompt share a number (any numbers, in any order)
    values [B, T]: the critic's, for gae
    greedy_scores [B]: the score of the greedy response to each one's prompt, for remax
    score_parts [B, K], part_weights (K numbers; all 1 when None): the reward's components, for gdpo
    log_probs, sum_pi_squared [B, T]: the policy's log-prob of each token, and the sum of its squared probabilities over
    the vocabulary there, for optimal_token_baseline and tir_optimal_token_baseline
    importance_weights [B, T]: of the two as well, see there; all 1 when None
    gamma, lam: of gae; gamma also of reinforce_plus_plus
    norm_adv_by_std_in_grpo: of grpo, grpo_passk and gdpo
    whiten: of gae, reinforce_plus_plus, reinforce_plus_plus_baseline and gdpo: whether they whiten their advantages;
    shift_mean: and whether that takes the mean off
    f_norm: of gpg; zero_tail: of the two token baselines
    No gradient flows into the results. Raises ValueError for an unknown name, shapes that do not fit, missing inputs.
    """
    estimator = ESTIMATORS.get(name)
    check_same_shape(token_rewards=token_rewards, response_mask=response_mask)
    if token_rewards.dim() != 2 or group.shape != token_rewards.shape[:1]:
        raise ValueError(f"token_rewards is {list(token_rewards.shape)} and group {list(group.shape)}: not [B, T], [B]")
    dense = {"values": values, "log_probs": log_probs, "sum_pi_squared": sum_pi_squared}
    dense["importance_weights"] = importance_weights
    check_same_shape(token_rewards=token_rewards, **{key: x for key, x in dense.items() if x is not None})
    if greedy_scores is not None:
        check_same_shape(group=group, greedy_scores=greedy_scores)
    with torch.no_grad():
        return estimator(
            AdvantageInputs(
                token_rewards,
                values,
                response_mask.bool(),
                group,
                greedy_scores,
                score_parts,
                part_weights,
                log_probs,
                sum_pi_squared,
                importance_weights,
                gamma,
                lam,
                norm_adv_by_std_in_grpo,
                whiten,
                shift_mean,
                f_norm,
                zero_tail,
            )
        )


@ESTIMATORS.register("gae")
def gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438), whitened over the mask.

    delta_t = r_t + gamma * V(next) - V_t and A_t = delta_t + gamma * lam * A(next), where "next" is the next token
    *inside the mask*: masked tokens carry V and the sum through and do not reset them (verl's convention). Their own
    rewards and values are not used. returns = A + V from before the whitening. verl always whitens; slime and
    Megatron-LM have a flag, as here; OpenRLHF uses the biased variance.
    """
    if inputs.values is None:
        raise ValueError("advantage estimator 'gae' needs values: configure a critic, or use a group estimator")
    mask, outside = inputs.mask, ~inputs.mask
    rewards = inputs.token_rewards.masked_fill(outside, 0)
    values = inputs.values.masked_fill(outside, 0)
    advantages = _advantages(rewards, values, mask, inputs.gamma, inputs.lam)
    return inputs.whitened(advantages), advantages + values


def _advantages(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Not whitened; rewards, values and the result are 0 outside the mask."""
    if _has_holes(mask):
        return _gae_of_mask_with_holes(rewards, values, mask, gamma, lam)
    return _gae_of_left_aligned(rewards, values, gamma, lam).masked_fill_(~mask, 0)


def _has_holes(mask: Tensor) -> bool:
    return bool((mask[:, 1:] & ~mask[:, :-1]).any())


def _gae_of_left_aligned(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """[B, T] -> [B, T]; rows hold zeros after their last token, so nothing has to be carried."""
    delta = rewards - values
    delta[:, :-1].add_(values[:, 1:], alpha=gamma)
    return discounted_suffix_sum(delta, gamma * lam)


def _gae_of_mask_with_holes(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Skipping masked tokens is the same as closing the gaps, scanning, and opening them again."""
    closed = torch.arange(mask.shape[1], device=mask.device) < mask.sum(1, keepdim=True)
    closed_rewards = torch.zeros_like(rewards).masked_scatter_(closed, rewards[mask])
    closed_values = torch.zeros_like(values).masked_scatter_(closed, values[mask])
    advantages = _gae_of_left_aligned(closed_rewards, closed_values, gamma, lam)
    return torch.zeros_like(values).masked_scatter_(mask, advantages[closed])


@ESTIMATORS.register("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262): the discounted reward-to-go, whitened over the mask.

    return_t = r_t + gamma * return of the next token *inside the mask*: observation tokens are skipped, as gae skips
    them. returns are those from before the whitening.
    """
    outside = ~inputs.mask
    rewards = inputs.token_rewards.masked_fill(outside, 0)
    returns = _advantages(rewards, torch.zeros_like(rewards), inputs.mask, inputs.gamma, lam=1.0)
    return inputs.whitened(returns), returns


@ESTIMATORS.register("remax")
def remax(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """ReMax (arXiv 2310.10505): the reward-to-go minus the score of the greedy response to the same prompt.

    Neither discounted nor whitened. As in verl, the baseline has no KL term, also where the token rewards do.
    """
    if inputs.greedy_scores is None:
        raise ValueError("advantage estimator 'remax' needs greedy_scores, the score of each prompt's greedy response")
    returns = reward_to_go(inputs)
    baseline = inputs.greedy_scores.to(returns.dtype)[:, None]
    return (returns - baseline).masked_fill(~inputs.mask, 0), returns


def reward_to_go(inputs: AdvantageInputs) -> Tensor:
    """[B, T]: the sum of the rewards from each token on, 0 outside the mask."""
    outside = ~inputs.mask
    return discounted_suffix_sum(inputs.token_rewards.masked_fill(outside, 0), 1.0).masked_fill(outside, 0)
