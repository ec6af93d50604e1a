"""Losses of a reward model over a step's batch: the scores they depend on, and their gradients.

One pass: whole rows lie in one micro-batch. Context-parallel ranks, each of which has some of its scores, add up their
scores; gradients stay local. Two passes: the first computes all scores, and the loss's derivative by each score then
weights the outputs of the second pass, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mrl import platform
from mrl.algo.registry import arguments
from mrl.algo.reward_losses import REWARD_LOSSES, LabelledScores, ScoreLists, ScorePairs
from mrl.learner.loss_terms import Loss, LossParts, Together
from mrl.options.reward_losses import Form


@dataclass(frozen=True)
class RewardTargets:
    """Targets of a step with S scores of R outputs.

    loss, options: as in mrl.algo.reward_losses; form: the kind of its units
    places [S] int64: the scores' indices among the outputs; row_of [S] int64: the data row of each score, ascending
    from 0 targets [S] float64: scores or labels; for pairs and lists ranks, 1 the best
    margin [rows] float64: for pairs
    outputs: R; together: samples of a row, or of each row
    """

    loss: str
    options: Mapping[str, Any]
    form: Form
    places: Tensor
    row_of: Tensor
    targets: Tensor
    margin: Tensor
    outputs: int
    together: Together

    def to(self, device: torch.device) -> RewardTargets:
        """Moves each tensor to the device."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    @cached_property
    def score_at(self) -> Tensor:
        """Index of each output's score, [R] int64; S for outputs without a score."""
        count = self.places.numel()
        found = self.places.new_full((self.outputs,), count)
        found[self.places] = torch.arange(count, device=found.device)
        return found

    @cached_property
    def table(self) -> Tensor:
        """Indices of each row's scores, [rows, m] int64, left-aligned; padded with S."""
        counts = self.row_of.bincount()
        present = torch.arange(int(counts.max()), device=counts.device)[None] < counts[:, None]
        found = torch.full(present.shape, self.places.numel(), device=counts.device)
        return found.masked_scatter_(present, torch.arange(self.places.numel(), device=counts.device))

    @cached_property
    def first(self) -> Tensor:
        """Index of each unit's first score, [units] int64."""
        whole_rows = self.form in ("pairs", "lists")
        return self.table[:, 0] if whole_rows else torch.arange(self.places.numel(), device=self.places.device)

    def units(self, scores: Tensor) -> Tensor:
        """Returns the losses [heads, units] of pairs, lists, responses or steps from the scores [heads, S], both
        float64.
        """
        loss = REWARD_LOSSES.get(self.loss)
        of: ScorePairs | ScoreLists | LabelledScores = LabelledScores(scores, self.targets)
        if self.form == "pairs":
            of = ScorePairs(scores[:, 0::2], scores[:, 1::2], self.margin)
        elif self.form == "lists":
            of = ScoreLists(_padded(scores)[:, self.table], _padded(self.targets)[self.table], self.present)
        return loss(of, **arguments(loss, self.options))

    @property
    def present(self) -> Tensor:
        """[rows, m] bool: True where `table` has a score."""
        return self.table < self.places.numel()

    def value(self, scores: Tensor, is_here: Tensor | None = None) -> Tensor:
        """Returns the mean over the step's units and the heads, 0-d; with `is_here` [S] bool, those scores' share of
        it.
        """
        each = self.units(scores).mean(0)
        return (each if is_here is None else torch.where(is_here[self.first], each, 0.0)).sum() / each.numel()


def _padded(values: Tensor) -> Tensor:
    """Appends a 0: [..., S] -> [..., S + 1]."""
    return torch.cat([values, values.new_zeros(*values.shape[:-1], 1)], -1)


def one_pass(on_host: RewardTargets, total_over_context: Callable[[Tensor], Tensor], context: int) -> Loss:
    """Returns the loss of one pass.

    context: number of ranks that hold parts of the same texts; each has the whole value, and reports its share.
    """
    t = on_host.to(platform.device())
    count = t.places.numel()

    def compute(output: Tensor, dest: Tensor) -> LossParts:
        heads, which = output.size(0), t.score_at[dest]
        local = output.new_zeros(heads, count + 1, dtype=torch.float64).index_add(1, which, output.double())[:, :count]
        seen = local.new_zeros(1, count + 1).index_add(1, which, torch.ones_like(output[:1], dtype=torch.float64))
        whole, here = total_over_context(torch.cat([local.detach(), seen[:, :count]])).split([heads, 1])
        value = t.value(whole + (local - local.detach()), here[0] > 0)
        return LossParts((value.detach() / context + (value - value.detach())).float(), [])

    return Loss(compute, (), together=t.together)


def two_pass(on_host: RewardTargets, scores: Tensor) -> tuple[Loss, float]:
    """Returns the second pass's loss and the total value. scores [heads, S]: of the first pass."""
    known = scores.detach().double().requires_grad_()
    value = on_host.value(known)
    [slope] = torch.autograd.grad(value, known)
    weights = torch.zeros(scores.size(0), on_host.outputs)
    weights[:, on_host.places] = slope.float()
    weights = weights.to(platform.device())

    def compute(output: Tensor, dest: Tensor) -> LossParts:
        return LossParts((weights[:, dest] * output).sum(), [])

    return Loss(compute, ()), float(value.detach())
