"""Advantages and PPO's loss on a GPU, each in one pass over the tokens: the counterpart of `mrl.kernels.native.algo`.

Parameters of kernels have no types except `constexpr`: triton looks their names up as values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

SUMS = 6
_COLUMNS = 1024  # tokens per program


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, decay: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (advantages [B, T], advantages + values, the advantages' moments for whitening).

    The moments are count, sum and sum of squares over the mask, [3] float64. mask [B, T] bool, with or without holes;
    all tensors are contiguous.
    """
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    rows, length = rewards.shape
    found = torch.zeros(rows, 3, dtype=torch.float64, device=rewards.device)
    if rewards.numel():
        bits = mask.view(torch.int8)
        _gae[(rows,)](rewards, values, bits, gamma, decay, advantages, returns, found, length, columns=_COLUMNS)
    return advantages, returns, found.sum(0)


def whiten_(x: Tensor, mask: Tensor, moments: Tensor, eps: float, shift_mean: bool) -> None:
    """Whitens x [B, T] in place as `mrl.algo.stats.whiten_`, with the `moments` [3] of `gae`."""
    if x.numel():
        grid = (triton.cdiv(x.numel(), _COLUMNS),)
        _whiten[grid](x, mask.view(torch.int8), moments, eps, x.numel(), shifts=shift_mean, columns=_COLUMNS)


def clipped_loss(vectors: Sequence[Tensor], clip: tuple[float, float, float, float]) -> tuple[Tensor, Tensor]:
    """Returns ([6] float64, gradient [n]) of `mrl.kernels.clipped_loss`, from its five vectors and a Clip's fields."""
    gradient, (low, high, ceiling, furthest) = torch.empty_like(vectors[0]), clip
    programs = triton.cdiv(gradient.numel(), _COLUMNS)
    sums = torch.zeros(SUMS, programs, dtype=torch.float64, device=gradient.device)
    if programs:
        given = (*vectors, gradient, sums, gradient.numel(), programs, 1 - low, 1 + high, ceiling, furthest)
        _clipped_loss[(programs,)](*given, columns=_COLUMNS)
    return sums.sum(1), gradient


@triton.jit
def _then(a, b, c, d):  # type: ignore[no-untyped-def]
    """Composes y -> a y + b with y -> c y + d."""
    return a * c, b * c + d


@triton.jit
def _gae(  # type: ignore[no-untyped-def]
    rewards, values, mask, gamma, decay, advantages, returns, found, length, columns: tl.constexpr
):
    """One program per row, from its end. Masked positions carry values through."""
    row = tl.program_id(0)
    offset = row.to(tl.int64) * length
    lane = tl.arange(0, columns)
    next_value = tl.full((), 0.0, tl.float32)
    next_advantage = tl.full((), 0.0, tl.float32)
    count = tl.full((), 0.0, tl.float64)
    total = tl.full((), 0.0, tl.float64)
    square = tl.full((), 0.0, tl.float64)
    blocks = tl.cdiv(length, columns)
    for number in range(0, blocks):
        at = (blocks - 1 - number) * columns + lane
        inside = at < length
        here = tl.load(mask + offset + at, mask=inside, other=0) != 0
        value = tl.load(values + offset + at, mask=here, other=0.0)
        reward = tl.load(rewards + offset + at, mask=here, other=0.0)
        behind = tl.load(mask + offset + at + 1, mask=at + 1 < length, other=0) != 0
        beyond = tl.load(values + offset + at + 1, mask=behind, other=0.0)
        left, own = tl.associative_scan((tl.where(behind, 0.0, 1.0), beyond), 0, _then, reverse=True)
        following = tl.where(left > 0, next_value, own)
        next_value = tl.sum(tl.where(lane == 0, following, 0.0), 0)
        delta = tl.where(here, reward + gamma * following - value, 0.0)
        power, inner = tl.associative_scan((tl.where(here, decay, 1.0), delta), 0, _then, reverse=True)
        carried = inner + power * next_advantage
        next_advantage = tl.sum(tl.where(lane == 0, carried, 0.0), 0)
        advantage = tl.where(here, carried, 0.0)
        tl.store(advantages + offset + at, advantage, mask=inside)
        tl.store(returns + offset + at, tl.where(here, carried + value, 0.0), mask=inside)
        wide = advantage.to(tl.float64)
        count += tl.sum(here.to(tl.float64), 0)
        total += tl.sum(wide, 0)
        square += tl.sum(wide * wide, 0)
    tl.store(found + 3 * row, count)
    tl.store(found + 3 * row + 1, total)
    tl.store(found + 3 * row + 2, square)


@triton.jit
def _whiten(x, mask, moments, eps, length, shifts: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Every program recomputes mean and scale from the three sums, which is faster than separate launches."""
    at = tl.program_id(0).to(tl.int64) * columns + tl.arange(0, columns)
    here = tl.load(mask + at, mask=at < length, other=0) != 0
    count, total, square = tl.load(moments), tl.load(moments + 1), tl.load(moments + 2)
    mean = (total / (count + eps)).to(tl.float32)
    centre = mean.to(tl.float64)
    around = tl.maximum(square - 2 * centre * total + count * centre * centre, 0.0)  # >= 0 despite rounding
    variance = tl.where(count > 1, around / (count + eps) * count / tl.maximum(count - 1, 1.0), 0.0)
    made = (tl.load(x + at, mask=here, other=0.0) - mean) * (1 / tl.sqrt(variance + eps)).to(tl.float32)
    if not shifts:
        made += mean
    tl.store(x + at, tl.where(here, made, 0.0), mask=at < length)


@triton.jit
def _clipped_loss(  # type: ignore[no-untyped-def]
    log_probs,
    old_log_probs,
    advantages,
    weights,
    metric_weights,
    gradient,
    sums,
    length,
    programs,
    low,
    high,
    ceiling,
    furthest,
    columns: tl.constexpr,
):
    """Uses comparisons instead of minima, to propagate NaN. Signs are those of the maximised objective."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * columns + tl.arange(0, columns)
    inside = at < length
    log_ratio = tl.load(log_probs + at, mask=inside, other=0.0) - tl.load(old_log_probs + at, mask=inside, other=0.0)
    advantage = tl.load(advantages + at, mask=inside, other=0.0)
    weight = tl.load(weights + at, mask=inside, other=0.0)
    metric_weight = tl.load(metric_weights + at, mask=inside, other=0.0)
    near = tl.abs(log_ratio) <= furthest
    log_ratio = tl.where(log_ratio > furthest, furthest, tl.where(log_ratio < -furthest, -furthest, log_ratio))
    ratio = tl.exp(log_ratio)
    gain = ratio * advantage
    bounded = tl.where(ratio > high, high, tl.where(ratio < low, low, ratio)) * advantage
    clipped = bounded < gain
    smaller = tl.where(clipped, bounded, gain)
    floor = tl.where(advantage < 0, advantage, 0.0) * ceiling
    below = floor > smaller
    value = tl.where(below, floor, smaller)
    slope = tl.where(clipped | below, 0.0, -gain) * weight
    tl.store(gradient + at, tl.where(near, slope, 0.0), mask=inside)
    weighted = log_ratio * metric_weight
    tl.store(sums + program, -tl.sum(value * weight, 0).to(tl.float64))
    tl.store(sums + programs + program, tl.sum(tl.where(clipped, metric_weight, 0.0), 0).to(tl.float64))
    tl.store(sums + 2 * programs + program, -tl.sum(weighted, 0).to(tl.float64))
    tl.store(sums + 3 * programs + program, tl.sum(tl.where(below, metric_weight, 0.0), 0).to(tl.float64))
    tl.store(sums + 4 * programs + program, 0.5 * tl.sum(weighted * log_ratio, 0).to(tl.float64))
    tl.store(sums + 5 * programs + program, tl.sum(ratio * metric_weight, 0).to(tl.float64))
