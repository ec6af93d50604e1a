"""PPO's clipped surrogate with the dual clip: loss, gradient and metrics in one pass over the tokens.

Each block of tokens stays in a core's cache while a few operations go over it, and the gradient is written down in
closed form while its parts are at hand. What a block says of ratios that are far from 1 (or of NaN) is left to the
composed form of the caller, which costs several times as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1 << 17  # tokens: half a MiB a float32 vector, a handful of which stay in the cache that cores share
BOUND = 8.0  # of log-ratios: up to here 2**(x / log(2)) is exp(x) to float32's last digits
METRICS = 5  # clipfrac, ppo_kl, clipfrac_lower, approxkl, ratio

# (log-probs of a block with a gradient, which tokens it is of) -> the block's loss 0-d and METRICS sums [5]
Composed = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Clip:
    """Ratios count between 1 - low and 1 + high, and up to `ceiling` where the advantage is negative."""

    low: float
    high: float
    ceiling: float


def fits(*tensors: Tensor) -> bool:
    """Whether `clipped_loss` takes them: on a CPU, all float32 or all float64."""
    first = tensors[0]
    usual = first.dtype in (torch.float32, torch.float64) and first.device.type == "cpu"
    return usual and all(x.dtype == first.dtype and x.device == first.device for x in tensors)


def clipped_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    metric_weights: Tensor,
    clip: Clip,
    composed: Composed,
) -> tuple[Tensor, Tensor]:
    """(sum of weights * loss 0-d, the metrics' sums [5] without a gradient): clipfrac, ppo_kl, clipfrac_lower,
    approxkl, ratio, as `mrl.algo.policy_loss.compute` describes them. All tensors [n] of one dtype that `fits`."""
    out: tuple[Tensor, Tensor] = _ClippedLoss.apply(
        log_probs, old_log_probs, advantages, weights, metric_weights, clip, composed
    )
    return out


class _ClippedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        weights: Tensor,
        metric_weights: Tensor,
        clip: Clip,
        composed: Composed,
    ) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(log_probs)
        room = gradient.new_empty(4, min(gradient.numel(), BLOCK))
        sums = [gradient.new_zeros(1 + METRICS)]
        vectors = (log_probs, old_log_probs, advantages, weights, metric_weights, gradient)
        for start, parts in zip(range(0, gradient.numel(), BLOCK), zip(*(x.split(BLOCK) for x in vectors))):
            new, old, advantage, weight, metric_weight, out = parts
            log_ratio, *scratch = room[:, : out.numel()].unbind()
            least, most = torch.sub(new, old, out=log_ratio).aminmax()
            if -BOUND <= float(least) <= float(most) <= BOUND:
                sums.append(_block(log_ratio, float(most), advantage, weight, metric_weight, clip, scratch, out))
            else:  # or NaN
                sums.append(_by_composed(new, slice(start, start + out.numel()), composed, out))
        ctx.save_for_backward(gradient)
        made = torch.stack(sums).double().sum(0).to(log_probs.dtype)
        loss, metrics = made[0].clone(), made[1:]
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient if grad == 1 else gradient * grad, *[None] * 6)


def _block(
    log_ratio: Tensor,
    most: float,
    advantage: Tensor,
    weight: Tensor,
    metric_weight: Tensor,
    clip: Clip,
    room: list[Tensor],
    out: Tensor,
) -> Tensor:
    """A block's loss and metrics [6], and its gradient in `out`. most: the largest log-ratio; they and the three of
    room are overwritten. Signs are those of what is maximised."""
    ratio, bounded, scratch = room
    torch.mul(log_ratio, metric_weight, out=scratch)
    kl, square = scratch.sum(), scratch.dot(log_ratio)
    torch.exp2(log_ratio.mul_(math.log2(math.e)), out=ratio)
    mean_ratio = ratio.dot(metric_weight)
    torch.clamp(ratio, 1 - clip.low, 1 + clip.high, out=bounded).mul_(advantage)
    gain = ratio.mul_(advantage)
    least = torch.minimum(gain, bounded, out=scratch)
    stopped = bounded.lt_(gain)  # 1 where the clip is at work, else 0
    clipped, at_ceiling = stopped.dot(metric_weight), torch.zeros_like(kl)
    if most > math.log(clip.ceiling):
        floor = torch.clamp(advantage, max=0, out=log_ratio).mul_(clip.ceiling)
        below = (floor - least).gt_(0)
        at_ceiling = below.dot(metric_weight)
        stopped.add_(below)
        torch.maximum(least, floor, out=least)
    value = least.dot(weight)
    torch.mul(gain.mul_(stopped.sub_(1)), weight, out=out)
    return torch.stack([-value, clipped, -kl, at_ceiling, square / 2, mean_ratio])


def _by_composed(log_probs: Tensor, rows: slice, composed: Composed, out: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = log_probs.detach().requires_grad_()
        loss, metrics = composed(leaf, rows)
        out.copy_(torch.autograd.grad(loss, leaf)[0])
    return torch.cat([loss.detach()[None], metrics])
