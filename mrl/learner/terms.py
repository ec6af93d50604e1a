"""What a learner is told to minimize: losses over some samples of a rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mrl.core import Rollout
from mrl.models.batch import NOTHING, Extras

Together = int | tuple[int, ...]


@dataclass(frozen=True)
class LossParts:
    """What a loss gives for one micro-batch: its local sum, and metrics to add up; all 0-d."""

    loss: Tensor
    sums: list[Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss and the names of its metrics (known on every rank, also where no output arrives).

    compute(model output [k, n], places [n] of its tokens in the flat response vectors) -> LossParts
    together: so many samples, one after the other, are in one micro-batch; or of each such group how many
    extras: what the pass does besides
    local: whether what it is of a token needs no other token's output, so that `compute` may see some tokens alone
    """

    compute: Callable[[Tensor, Tensor], LossParts]
    sums: tuple[str, ...]
    together: Together = 1
    extras: Extras = NOTHING
    local: bool = False


@dataclass(frozen=True)
class Term:
    """A loss over some samples of a rollout, whose log-probs are those at `temperature`. An update may sum several."""

    rollout: Rollout
    sample_ids: range | list[int]
    loss: Loss
    temperature: float
    entropy_grad: bool = False  # whether the entropies take part in the loss
