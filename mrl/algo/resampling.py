"""Policy filtration (PF-PPO, arXiv 2409.06957): trains on samples redrawn from the step's own by score, because extreme
scores are the most reliable. Names and constants are verl's, which offers it for gae only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mrl.algo.registry import Registry

WEIGHT_EPS = 1e-8

METHODS: Registry[Callable[[Tensor, float], Tensor]] = Registry("reweighting method")


def draw(method: str, scores: Tensor, generator: torch.Generator, weight_pow: float = 2.0) -> Tensor:
    """Draws as many samples as there are scores, with replacement, in proportion to their weights: indices [B] int64.

    scores [B]: of the whole step. generator: on the CPU; equal generators on all ranks give equal draws. Raises
    ValueError for an unknown method, or scores that are not finite.
    """
    weights = METHODS.get(method)(scores.double().cpu(), weight_pow) + WEIGHT_EPS
    if not bool(weights.isfinite().all()):
        raise ValueError("samples cannot be drawn by scores that are not finite")
    return torch.multinomial(weights, scores.numel(), replacement=True, generator=generator)


@METHODS.register("pow")
def by_power(scores: Tensor, weight_pow: float) -> Tensor:
    """|score| ** weight_pow."""
    return scores.abs().pow(weight_pow)


@METHODS.register("max_min")
def best_and_worst(scores: Tensor, weight_pow: float) -> Tensor:
    """1 for the highest and the lowest score of the step, 0 for the others."""
    return ((scores == scores.max()) | (scores == scores.min())).double()


@METHODS.register("max_random")
def best_and_some(scores: Tensor, weight_pow: float) -> Tensor:
    """0.4 for the highest score of the step, 0.1 for the others."""
    return torch.full_like(scores, 0.1).masked_fill(scores == scores.max(), 0.4)
