"""Selection of the tokens that a loss treats differently.

Call with the whole mini-batch: `mask` is True on its tokens, all tensors have one shape (flat [R] in training), results
are bool and False outside the mask.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mrl.algo.policy_loss import PolicyInputs
from mrl.algo.policy_loss_token import clipped_surrogate
from mrl.algo.registry import Registry, arguments
from mrl.algo.stats import check_same_shape, masked_mean
from mrl.options.losses import POLICY_LOSSES

Choice = Callable[..., Tensor]
CHOICES: Registry[Choice] = Registry("choice of tokens")


@torch.no_grad()
def choose(
    loss_name: str,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    generator: torch.Generator,
    **options: float,
) -> Tensor:
    """Returns the tokens that the policy loss `loss_name` (clip_cov, kl_cov) treats differently.

    log_probs: the current policy's, before the update. generator: on the CPU; equal generators on all ranks give equal
    choices. options: the loss's own. Raises ValueError for another loss, or shapes that differ.
    """
    function = CHOICES.get(loss_name)
    check_same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask)
    settings = arguments(function, POLICY_LOSSES[loss_name].filled(options))
    return function(PolicyInputs(log_probs, old_log_probs, advantages, None, None), mask.bool(), generator, **settings)


@CHOICES.register("clip_cov")
def for_clip_cov(
    t: PolicyInputs,
    mask: Tensor,
    generator: torch.Generator,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> Tensor:
    """Picks at random a share clip_cov_ratio of the mini-batch's tokens (at least 1).

    Candidates have clip_cov_lb < covariance < clip_cov_ub and are not clipped by PPO.
    """
    _, clipped = clipped_surrogate(t.log_ratio.exp(), t.advantages, clip_ratio_low, clip_ratio_high)
    covariance = _covariance(t, mask)
    possible = mask & ~clipped & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    places = possible.flatten().nonzero()[:, 0]
    order = torch.randperm(places.numel(), generator=generator)
    return _at(places[order[: _share(mask, clip_cov_ratio)].to(places.device)], mask)


@CHOICES.register("kl_cov")
def for_kl_cov(t: PolicyInputs, mask: Tensor, generator: torch.Generator, kl_cov_ratio: float) -> Tensor:
    """Picks the share kl_cov_ratio of the mini-batch's tokens (at least 1) with the highest covariance;
    deterministic.
    """
    return _highest(_covariance(t, mask), mask, kl_cov_ratio)


def high_entropy(entropies: Tensor, mask: Tensor, ratio: float) -> Tensor:
    """Returns the share `ratio` of the mask's tokens (at least 1) with the highest entropy (arXiv 2506.01939;
    LightRFT).
    """
    check_same_shape(entropies=entropies, mask=mask)
    return _highest(entropies, mask.bool(), ratio)


def _covariance(t: PolicyInputs, mask: Tensor) -> Tensor:
    """Each token's share of the covariance of advantage and log-prob: (A - mean A) * (log_prob - mean log_prob)."""
    advantages, log_probs = t.advantages.double(), t.log_probs.double()
    return (advantages - masked_mean(advantages, mask)) * (log_probs - masked_mean(log_probs, mask))


def _highest(values: Tensor, mask: Tensor, ratio: float) -> Tensor:
    inside = values.masked_fill(~mask, -torch.inf).flatten()
    return _at(inside.topk(_share(mask, ratio)).indices, mask)


def _share(mask: Tensor, ratio: float) -> int:
    count = int(mask.sum())
    return min(count, max(1, int(ratio * count)))


def _at(places: Tensor, mask: Tensor) -> Tensor:
    chosen = torch.zeros_like(mask)
    chosen.view(-1)[places] = True
    return chosen
