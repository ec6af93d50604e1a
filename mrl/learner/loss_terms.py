"""Objectives of a learner: losses over some samples of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl import platform
from mrl.core import PackedBatch, Rollout
from mrl.kernels.linear_divergence import Divergence, TopTokens
from mrl.models.batch import DEFAULT_PASS_OPTIONS, PassOptions, TeacherBatch, TeacherRows

Together = int | tuple[int, ...]


@dataclass(frozen=True)
class LossParts:
    """Result of a loss for one micro-batch: its local sum, and metrics to add up; all 0-d."""

    loss: Tensor
    sums: list[Tensor]


@dataclass(frozen=True)
class TeacherStates:
    """Hidden states of one teacher for the tokens of one update, on the ranks with the head.

    states: for each micro-batch the tokens' indices [m] in the flat response vectors, and their hidden states [m, h]
    weight [padded vocabulary / tp, h]: this rank's part of its lm_head; vocab_size: as in TeacherRows
    """

    states: list[tuple[Tensor, Tensor]]
    weight: Tensor
    vocab_size: int

    def rows_of(self, number: int, packed: PackedBatch) -> TeacherRows:
        """Returns its rows of micro-batch `number`, whose tokens are on this rank's device.

        Raises RuntimeError if the teacher's tokens are not among those of the micro-batch.
        """
        indices, hidden = (each.to(platform.device()) for each in self.states[number])
        rows = torch.isin(packed.response_indices, indices).nonzero()[:, 0]
        if not torch.equal(packed.response_indices[rows], indices):
            raise RuntimeError(f"micro-batch {number} of the student has other tokens than the teacher's")
        return TeacherRows(rows, (hidden, self.weight), self.vocab_size)


@dataclass(frozen=True)
class TeacherTokens:
    """Outputs of teachers on engines for one update's response tokens.

    taught [R] bool: tokens that they teach; top: of all R tokens; vocab_size: the student's
    """

    taught: Tensor
    top: TopTokens
    vocab_size: int

    def rows_of(self, number: int, packed: PackedBatch) -> TeacherRows:
        """Returns as `TeacherStates.rows_of`."""
        indices = packed.response_indices.cpu()
        rows = self.taught[indices].nonzero()[:, 0]
        top = self.top.at(indices[rows])
        device = platform.device()
        here = TopTokens(top.ids.to(device, torch.int64), top.log_probs.to(device))
        return TeacherRows(rows.to(device), here, self.vocab_size)


@dataclass(frozen=True)
class Distillation:
    """Teachers of an update. weights [R]: gradient of the loss by the divergence of each response token."""

    teachers: Sequence[TeacherStates | TeacherTokens]
    divergence: Divergence
    weights: Tensor

    def of(self, number: int, packed: PackedBatch) -> TeacherBatch:
        """Returns the teachers of micro-batch `number`, whose tokens are on this rank's device."""
        found = tuple(rows for each in self.teachers if (rows := each.rows_of(number, packed)).rows.numel())
        return TeacherBatch(found, self.divergence, self.weights.to(platform.device())[packed.response_indices])


@dataclass(frozen=True)
class Loss:
    """Loss and the names of its metrics, known on every rank, including ranks without outputs.

    compute(model output [k, n], indices [n] of its tokens in the flat response vectors) -> LossParts
    together: number of consecutive samples that share a micro-batch, or the size of each such group
    extras: additional computations of the pass
    local: True if the loss of a token depends on that token's output alone, so that `compute` may get a part of the
    tokens
    distillation: teachers; the last row of the model output is then the divergence, with weights that must be those in
    `compute`
    """

    compute: Callable[[Tensor, Tensor], LossParts]
    sums: tuple[str, ...]
    together: Together = 1
    extras: PassOptions = DEFAULT_PASS_OPTIONS
    local: bool = False
    distillation: Distillation | None = None


@dataclass(frozen=True)
class LossTerm:
    """Loss over some samples of a rollout, with log-probs at `temperature`. An update may sum several."""

    rollout: Rollout
    sample_ids: range | list[int]
    loss: Loss
    temperature: float
    entropy_grad: bool = False  # True if the loss depends on the entropies
