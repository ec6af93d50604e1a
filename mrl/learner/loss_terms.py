"""Objectives of a learner: losses over some samples of a rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mrl.core import Rollout
from mrl.models.batch import DEFAULT_PASS_OPTIONS, PassOptions

Together = int | tuple[int, ...]


@dataclass(frozen=True)
class LossParts:
    """Result of a loss for one micro-batch: its local sum, and metrics to add up; all 0-d."""

    loss: Tensor
    sums: list[Tensor]


@dataclass(frozen=True)
class Loss:
    """Loss and the names of its metrics, known on every rank, including ranks without outputs.

    compute(model output [k, n], indices [n] of its tokens in the flat response vectors) -> LossParts
    together: number of consecutive samples that share a micro-batch, or the size of each such group
    extras: additional computations of the pass
    local: True if the loss of a token depends on that token's output alone, so that `compute` may get a part of the
    tokens
    """

    compute: Callable[[Tensor, Tensor], LossParts]
    sums: tuple[str, ...]
    together: Together = 1
    extras: PassOptions = DEFAULT_PASS_OPTIONS
    local: bool = False


@dataclass(frozen=True)
class LossTerm:
    """Loss over some samples of a rollout, with log-probs at `temperature`. An update may sum several."""

    rollout: Rollout
    sample_ids: range | list[int]
    loss: Loss
    temperature: float
    entropy_grad: bool = False  # True if the loss depends on the entropies
