"""Clipped regression loss of the critic."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algo.stats import check_same_shape


def compute(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    cliprange_value: float = 0.5,
    metric_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns (loss 0-d, metrics 0-d and detached); all tensors of one shape, any shape; gradient through `values`
    only.

    loss = sum(weights * 0.5 * max((v - ret)^2, (clip(v, v_old - c, v_old + c) - ret)^2)), as in PPO's reference code
    and verl. TRL multiplies by vf_coef 0.1 and clips at 0.2; slime has no 0.5 and clips at 0.2. Weights and metrics
    are those of `mrl.algo.policy_loss.compute`. Metric vf_clipfrac: tokens whose clipped term is the larger one.
    Raises ValueError for shapes that differ or a clip range that is not positive.
    """
    if cliprange_value <= 0:
        raise ValueError(f"cliprange_value must be > 0, got {cliprange_value}")
    metric_weights = weights if metric_weights is None else metric_weights
    check_same_shape(
        values=values, old_values=old_values, returns=returns, weights=weights, metric_weights=metric_weights
    )
    old_values, returns = old_values.detach(), returns.detach()
    within = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    unclipped = (values - returns).square()
    clipped = (within - returns).square()
    loss = 0.5 * (weights * torch.maximum(unclipped, clipped)).sum()
    with torch.no_grad():
        metrics = {"vf_clipfrac": ((clipped > unclipped) * metric_weights).sum()}
    return loss, metrics
