"""Advantage estimators by name.

Tensors are dense [B, T]: one response a row, `response_mask` True on the tokens the policy generated. Masks may have
holes (observations between turns) and rows may be empty. `group` tells an estimator all it needs to know about groups,
so call it with the whole global batch. Advantages and returns are 0 outside the mask (verl's gae leaves whitened
values there).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrl.algo.registry import Registry, arguments
from mrl.algo.scan import SuffixSums, discounted_suffix_sum
from mrl.algo.stats import check_same_shape, whiten, whiten_
from mrl.kernels import triton_support
from mrl.kernels.masked import bits, has_holes, keep, row_groups
from mrl.kernels.native import algo as native
from mrl.options.estimators import ESTIMATORS as OPTIONS


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an advantage estimator, for the whole global batch of B responses of up to T tokens.

    token_rewards [B, T] floating point: the score on a response's last token, plus per-token terms such as -beta * KL
    mask [B, T] bool: the tokens that the policy generated
    group [B] int64: responses to one prompt share a number (any numbers, in any order)
    values [B, T]: the critic's values
    greedy_scores [B]: the score of the greedy response to the same prompt
    score_parts [B, K]: the reward's components
    log_probs, sum_pi_squared [B, T]: the policy's log-prob of each token, and the sum of the squared probabilities over
    the vocabulary at that position
    importance_weights [B, T]: factors of the policy loss, all 1 when None
    Raises ValueError for shapes that do not fit.
    """

    token_rewards: Tensor
    mask: Tensor
    group: Tensor
    values: Tensor | None = None
    greedy_scores: Tensor | None = None
    score_parts: Tensor | None = None
    log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    importance_weights: Tensor | None = None

    def __post_init__(self) -> None:
        rewards, group = self.token_rewards, self.group
        check_same_shape(token_rewards=rewards, response_mask=self.mask)
        if rewards.dim() != 2 or group.shape != rewards.shape[:1]:
            raise ValueError(f"token_rewards is {list(rewards.shape)} and group {list(group.shape)}: not [B, T], [B]")
        dense = {name: vars(self)[name] for name in ("values", "log_probs", "sum_pi_squared", "importance_weights")}
        check_same_shape(token_rewards=rewards, **{name: x for name, x in dense.items() if x is not None})
        if self.greedy_scores is not None:
            check_same_shape(group=group, greedy_scores=self.greedy_scores)


Estimator = Callable[..., tuple[Tensor, Tensor]]  # f(AdvantageInputs, its options) -> (advantages, returns) [B, T]
ESTIMATORS: Registry[Estimator] = Registry("advantage estimator")
LIBRARY_NAMES = {  # of options, as arguments of `compute`
    "whiten": "whiten_advantages",
    "shift_mean": "whiten_shift_mean",
    "f_norm": "gpg_f_norm",
    "part_weights": "gdpo_reward_weights",
}


def compute(
    name: str | Estimator,
    *,
    token_rewards: Tensor,
    response_mask: Tensor,
    group: Tensor,
    values: Tensor | None = None,
    greedy_scores: Tensor | None = None,
    score_parts: Tensor | None = None,
    log_probs: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    importance_weights: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Returns (advantages [B, T], returns [B, T]); both may be one tensor. No gradient flows into them.

    name: a registered estimator, or a function such as `mrl.algo.custom` loads. The tensors are those of
    `AdvantageInputs`; response_mask [B, T] bool or 0/1. options: the estimator's own, with the defaults of
    mrl.options.estimators; options of other estimators are ignored.
    Raises ValueError for an unknown name, shapes that do not fit, or missing inputs; TypeError for an unknown option.
    """
    estimator = ESTIMATORS.get(name) if isinstance(name, str) else name
    settings = _settings(name, options) if isinstance(name, str) else options
    inputs = AdvantageInputs(
        token_rewards=token_rewards,
        mask=response_mask.bool(),
        group=group,
        values=values,
        greedy_scores=greedy_scores,
        score_parts=score_parts,
        log_probs=log_probs,
        sum_pi_squared=sum_pi_squared,
        importance_weights=importance_weights,
    )
    with torch.no_grad():
        return estimator(inputs, **settings)


def _settings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the registered estimator."""
    given = {LIBRARY_NAMES.get(key, key): value for key, value in given.items()}
    every = {key for kind in OPTIONS.values() for key in kind.model_fields}
    if unknown := sorted(given.keys() - every):
        raise TypeError(f"no advantage estimator has an option {', '.join(unknown)}")
    fields = OPTIONS[name].model_fields
    settings = OPTIONS[name].filled({key: value for key, value in given.items() if key in fields})
    return arguments(ESTIMATORS.get(name), settings)


def whitened(advantages: Tensor, inputs: AdvantageInputs, whiten_advantages: bool, whiten_shift_mean: bool) -> Tensor:
    """Returns the advantages [B, T], whitened over the mask if `whiten_advantages`."""
    return whiten(advantages, inputs.mask, whiten_shift_mean) if whiten_advantages else advantages


@ESTIMATORS.register("gae")
def gae(
    inputs: AdvantageInputs, gamma: float, lam: float, whiten_advantages: bool, whiten_shift_mean: bool
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438), whitened over the mask.

    delta_t = r_t + gamma * V(next) - V_t and A_t = delta_t + gamma * lam * A(next), where "next" is the next token
    *inside the mask*: masked tokens carry V and the sum through and do not reset them (verl's convention). Their own
    rewards and values are not used. returns = A + V from before the whitening. verl always whitens; slime and
    Megatron-LM have a flag, as here; OpenRLHF uses the biased variance.
    """
    if inputs.values is None:
        raise ValueError("advantage estimator 'gae' needs values: configure a critic, or use a group estimator")
    advantages, returns, moments = _advantages(inputs.token_rewards, inputs.values, inputs.mask, gamma, lam)
    if whiten_advantages:
        whiten_(advantages, inputs.mask, whiten_shift_mean, moments)
    return advantages, returns


def _advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the unwhitened advantages, advantages + values (both 0 outside the mask), and the advantages'
    `moments` for `whiten_` where known.
    """
    if mask.is_contiguous() and triton_support.supports(rewards, values):
        from mrl.kernels import algo_triton

        return algo_triton.gae(rewards, values, mask, gamma, gamma * lam)
    if mask.is_contiguous() and native.supports(rewards, values):
        if (made := native.gae(rewards, values, mask, gamma, gamma * lam)) is not None:
            return made
    elif not has_holes(mask):
        return *_gae_of_left_aligned(rewards, values, mask, gamma, lam), None
    return *_gae_of_mask_with_holes(rewards, values, mask, gamma, lam), None


def _gae_of_left_aligned(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE of rows whose tokens come first: nothing has to be carried over masked positions."""
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    sums = SuffixSums(gamma * lam, rewards)
    for rows in row_groups(rewards):
        ones = bits(mask[rows], rewards.dtype)
        value = keep(values[rows], ones)
        delta = keep(rewards[rows], ones).sub_(value)
        delta[:, :-1].add_(value[:, 1:], alpha=gamma)
        sums.write(delta, advantages[rows])
        torch.add(advantages[rows], value, out=returns[rows])
    return advantages, returns


def _gae_of_mask_with_holes(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE of rows with masked positions inside: closes the gaps, scans, and opens the gaps again."""
    closed = torch.arange(mask.shape[1], device=mask.device) < mask.sum(1, keepdim=True)
    closed_rewards = torch.zeros_like(rewards).masked_scatter_(closed, rewards[mask])
    closed_values = torch.zeros_like(values).masked_scatter_(closed, values[mask])
    found = _gae_of_left_aligned(closed_rewards, closed_values, closed, gamma, lam)
    advantages, returns = (torch.zeros_like(values).masked_scatter_(mask, dense[closed]) for dense in found)
    return advantages, returns


@ESTIMATORS.register("reinforce_plus_plus")
def reinforce_plus_plus(
    inputs: AdvantageInputs, gamma: float, whiten_advantages: bool, whiten_shift_mean: bool
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262): the discounted reward-to-go, whitened over the mask.

    return_t = r_t + gamma * return of the next token *inside the mask*: observation tokens are skipped, as gae skips
    them. returns are those from before the whitening.
    """
    values = torch.zeros_like(inputs.token_rewards)
    returns, _, _ = _advantages(inputs.token_rewards, values, inputs.mask, gamma, lam=1.0)
    return whitened(returns, inputs, whiten_advantages, whiten_shift_mean), returns


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
    """Returns the sum of the rewards from each token on, [B, T], 0 outside the mask."""
    outside = ~inputs.mask
    return discounted_suffix_sum(inputs.token_rewards.masked_fill(outside, 0), 1.0).masked_fill(outside, 0)
