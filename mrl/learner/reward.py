"""The losses of a reward model over a step's batch: which scores they are functions of, and their gradients.

In one pass whole rows lie in one micro-batch; context-parallel ranks, each of which has some of its scores, add up what
they have, and the gradient stays where it lies. In two passes all scores are known first, from them the derivative of
the loss by each, and then these are their weights, wherever they lie.
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
from mrl.algo.reward_losses import REWARD_LOSSES, Labels, ScoreLists, ScorePairs
from mrl.learner.terms import Loss, LossParts, Together
from mrl.options.reward_losses import Form


@dataclass(frozen=True)
class RewardTargets:
    """Of a step with S scores of R outputs.

    loss, options: as in mrl.algo.reward_losses; form: what its units are
    places [S] int64: of the scores among the outputs; row_of [S] int64: the row of the data that each is of, from 0, in
    order
    targets [S] float64: scores or labels; of pairs and lists ranks, 1 the best
    margin [rows] float64: of pairs
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
        """Each tensor on the device."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    @cached_property
    def score_at(self) -> Tensor:
        """[R] int64: which score an output is; S: none."""
        count = self.places.numel()
        found = self.places.new_full((self.outputs,), count)
        found[self.places] = torch.arange(count, device=found.device)
        return found

    @cached_property
    def table(self) -> Tensor:
        """[rows, m] int64: the scores of each row, left-aligned; S where there are no more."""
        counts = self.row_of.bincount()
        present = torch.arange(int(counts.max()), device=counts.device)[None] < counts[:, None]
        found = torch.full(present.shape, self.places.numel(), device=counts.device)
        return found.masked_scatter_(present, torch.arange(self.places.numel(), device=counts.device))

    @cached_property
    def first(self) -> Tensor:
        """[units] int64: the first score of each."""
        whole_rows = self.form in ("pairs", "lists")
        return self.table[:, 0] if whole_rows else torch.arange(self.places.numel(), device=self.places.device)

    def units(self, scores: Tensor) -> Tensor:
        """[heads, units] from the scores [heads, S], both float64: the losses of pairs, lists, responses or steps."""
        loss = REWARD_LOSSES.get(self.loss)
        of: ScorePairs | ScoreLists | Labels = Labels(scores, self.targets)
        if self.form == "pairs":
            of = ScorePairs(scores[:, 0::2], scores[:, 1::2], self.margin)
        elif self.form == "lists":
            of = ScoreLists(_padded(scores)[:, self.table], _padded(self.targets)[self.table], self.present)
        return loss(of, **arguments(loss, self.options))

    @property
    def present(self) -> Tensor:
        """[rows, m] bool: where `table` has a score."""
        return self.table < self.places.numel()

    def value(self, scores: Tensor, is_here: Tensor | None = None) -> Tensor:
        """0-d: the mean over the step's units and the heads; of the scores that `is_here` [S] bool their share of
        it."""
        each = self.units(scores).mean(0)
        return (each if is_here is None else torch.where(is_here[self.first], each, 0.0)).sum() / each.numel()


def _padded(values: Tensor) -> Tensor:
    """[..., S] -> [..., S + 1], the last one 0."""
    return torch.cat([values, values.new_zeros(*values.shape[:-1], 1)], -1)


def one_pass(on_host: RewardTargets, total_over_context: Callable[[Tensor], Tensor], context: int) -> Loss:
    """context: ranks that hold parts of the same texts; each has the whole value, and reports its share."""
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
    """The second pass's loss, and the value of the whole. scores [heads, S]: of the first pass."""
    known = scores.detach().double().requires_grad_()
    value = on_host.value(known)
    [slope] = torch.autograd.grad(value, known)
    weights = torch.zeros(scores.size(0), on_host.outputs)
    weights[:, on_host.places] = slope.float()
    weights = weights.to(platform.device())

    def compute(output: Tensor, dest: Tensor) -> LossParts:
        return LossParts((weights[:, dest] * output).sum(), [])

    return Loss(compute, ()), float(value.detach())
