"""PPO's clipped surrogate with the dual clip: loss, gradient and metrics in one pass over the tokens.

Each block of tokens stays in a core's cache while a few operations go over it, and the gradient is written in closed
form from their results. A token's result never depends on the others of its block: a chunk of tokens is clipped like
the whole. (`torch.exp2` would be faster than `exp`, but rounds the last tokens differently.)

In float32 `mrl.kernels.native` computes it if available, and on a GPU `mrl.kernels.algo_triton`.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrl.kernels import triton_support
from mrl.kernels.native import algo as native

BLOCK = 1 << 17  # tokens: half a MiB a float32 vector, a handful of which stay in the cache that cores share
METRICS = 5  # clipfrac, ppo_kl, clipfrac_lower, approxkl, ratio
ROUNDING = 1e-3  # margin of log-ratios beyond which their ratios surely differ


@dataclass(frozen=True)
class Clip:
    """Bounds of ratios: 1 - low and 1 + high, and `ceiling` where the advantage is negative.

    Log-ratios are clamped to +- furthest: a token beyond that has no gradient.
    """

    low: float
    high: float
    ceiling: float
    furthest: float


def supports_clipped_loss(*tensors: Tensor) -> bool:
    """Returns True if `clipped_loss` supports the tensors: on a CPU, all float32 or all float64; on a GPU float32, with
    triton.
    """
    first = tensors[0]
    if triton_support.supports(*tensors):
        return True
    usual = first.dtype in (torch.float32, torch.float64) and first.device.type == "cpu"
    return usual and all(x.dtype == first.dtype and x.device == first.device for x in tensors)


def clipped_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    metric_weights: Tensor,
    clip: Clip,
) -> tuple[Tensor, Tensor]:
    """Returns (sum of weights * loss 0-d, the metrics' sums [5] without a gradient). All tensors [n] of one dtype that
    `supports_clipped_loss`.

    The metrics are clipfrac, ppo_kl, clipfrac_lower, approxkl, ratio, as in `mrl.algo.policy_loss.compute`.
    """
    out: tuple[Tensor, Tensor] = _ClippedLoss.apply(log_probs, old_log_probs, advantages, weights, metric_weights, clip)
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
    ) -> tuple[Tensor, Tensor]:
        vectors = (log_probs, old_log_probs, advantages, weights, metric_weights)
        if triton_support.supports(*vectors):
            from mrl.kernels import algo_triton

            sums, gradient = algo_triton.clipped_loss(vectors, astuple(clip))
        elif native.supports(*vectors) and clip.furthest <= native.FURTHEST:
            sums, gradient = native.clipped_loss(vectors, astuple(clip))
        else:
            sums, gradient = _in_blocks(vectors, clip)
        ctx.save_for_backward(gradient)
        made = sums.to(log_probs.dtype)
        loss, metrics = made[0].clone(), made[1:]
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        is_one = not grad.is_cuda and grad == 1  # on CUDA the check would synchronise
        return (gradient if is_one else gradient * grad, *[None] * 5)


def _in_blocks(vectors: tuple[Tensor, ...], clip: Clip) -> tuple[Tensor, Tensor]:
    """Returns (loss and metrics [6] float64, the gradient)."""
    gradient = torch.empty_like(vectors[0])
    room = gradient.new_empty(4, min(gradient.numel(), BLOCK))
    sums = [gradient.new_zeros(1 + METRICS)]
    for start in range(0, gradient.numel(), BLOCK):
        new, old, advantage, weight, metric_weight, out = (x[start : start + BLOCK] for x in (*vectors, gradient))
        log_ratio, *scratch = room[:, : out.numel()].unbind()
        torch.sub(new, old, out=log_ratio)
        sums.append(_block(log_ratio, advantage, weight, metric_weight, clip, scratch, out))
    return torch.stack(sums).double().sum(0), gradient


def _block(
    log_ratio: Tensor,
    advantage: Tensor,
    weight: Tensor,
    metric_weight: Tensor,
    clip: Clip,
    room: list[Tensor],
    out: Tensor,
) -> Tensor:
    """Returns a block's loss and metrics [6], and writes its gradient to `out`.

    Overwrites the log-ratios and the three buffers of `room`. Signs are those of the maximised objective.
    """
    ratio, bounded, scratch = room
    least, most = map(float, log_ratio.aminmax())
    far = None
    if not -clip.furthest <= least <= most <= clip.furthest:  # or NaN
        far = ~(log_ratio.abs() <= clip.furthest)
        log_ratio.clamp_(-clip.furthest, clip.furthest)
    torch.mul(log_ratio, metric_weight, out=scratch)
    kl, square = scratch.sum(), scratch.dot(log_ratio)
    torch.exp(log_ratio, out=ratio)
    mean_ratio = ratio.dot(metric_weight)
    torch.clamp(ratio, 1 - clip.low, 1 + clip.high, out=bounded).mul_(advantage)
    gain = ratio.mul_(advantage)
    smaller = torch.minimum(gain, bounded, out=scratch)
    stopped = bounded.lt_(gain)  # 1 where the clip applies, else 0
    clipped, at_ceiling = stopped.dot(metric_weight), torch.zeros_like(kl)
    if not most <= math.log(clip.ceiling) - ROUNDING:
        floor = torch.clamp(advantage, max=0, out=log_ratio).mul_(clip.ceiling)
        below = (floor - smaller).gt_(0)
        at_ceiling = below.dot(metric_weight)
        stopped.add_(below)
        torch.maximum(smaller, floor, out=smaller)
    value = smaller.dot(weight)
    torch.mul(gain.mul_(stopped.sub_(1)), weight, out=out)
    if far is not None:
        out.masked_fill_(far, 0)
    return torch.stack([-value, clipped, -kl, at_ceiling, square / 2, mean_ratio])
