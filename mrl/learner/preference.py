"""The losses of preference learning over a step's batch: which sums they are functions of, and their gradients.

One pass: whole rows lie in one micro-batch, which sums its own tokens; context-parallel ranks add up their parts, whose
gradient stays where they lie. Two passes: all sums are known first, from them the derivative of the loss by each, and
the tokens then carry these as weights, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrl import platform
from mrl.algo.preference import PAIR_LOSSES, Pairs, Sums
from mrl.algo.preference_unpaired import LABEL_LOSSES, Labelled
from mrl.algo.registry import arguments
from mrl.core import Rollout
from mrl.learner.learner import Loss, LossParts
from mrl.options.preference import PreferenceOptions


@dataclass(frozen=True)
class Targets:
    """Of a step of B responses; the sums are float64.

    losses: by name
    member [R] int64: which response each token is of; token_weights [R]: what it counts in its response's sum
    mean_weights [R]: of the mean over the step's tokens
    reference [B]: sums; tokens [B]: numbers; labels [B] bool: chosen, or labelled true
    together: responses of a row; row_weights: of the B / together rows
    kl, shift: as in `mrl.algo.preference_unpaired.Labelled`
    """

    losses: Mapping[str, PreferenceOptions]
    member: Tensor
    token_weights: Tensor
    mean_weights: Tensor
    reference: Tensor
    tokens: Tensor
    labels: Tensor
    together: int
    row_weights: Tensor
    kl: Tensor
    shift: float = 0.0

    def to(self, device: torch.device) -> Targets:
        """Each tensor on the device."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def sums(self, log_probs: Tensor, places: Tensor | slice = slice(None)) -> Tensor:
        """[B] float64: of the tokens at `places` [n], whose log-probs [n] these are."""
        weighed = self.token_weights[places] * log_probs.double()
        return torch.zeros_like(self.reference).index_add(0, self.member[places], weighed)

    def sides(self, policy: Tensor) -> Pairs:
        """Of pairs, from the sums [B]."""
        parts = [(x[0::2], x[1::2]) for x in (policy, self.reference, self.tokens)]
        return Pairs(*(Sums(*(part[half] for part in parts)) for half in (0, 1)))

    def by_loss(self, policy: Tensor) -> dict[str, Tensor]:
        """Every loss of every row, from the policy's sums [B]: [B / together] each, without the losses' weights."""
        found = {}
        for name, options in self.losses.items():
            if options.is_unpaired:
                loss: Callable[..., Tensor] = LABEL_LOSSES.get(name)
                of: Labelled | Pairs = Labelled(
                    Sums(policy, self.reference, self.tokens), self.labels, self.kl, self.shift
                )
            else:
                loss, of = PAIR_LOSSES.get(name), self.sides(policy)
            found[name] = self.row_weights * loss(of, **arguments(loss, dict(options)))
        return found

    def value(self, policy: Tensor, rows: Tensor | None = None) -> Tensor:
        """0-d: the weighted sum of the losses' means over the step's rows; of `rows` bool alone their share of it."""
        total = torch.zeros_like(self.row_weights)
        for name, values in self.by_loss(policy).items():
            total = total + self.losses[name].weight * values
        return (total if rows is None else torch.where(rows, total, 0.0)).sum() / total.numel()


def targets(
    batch: Rollout,
    losses: Mapping[str, PreferenceOptions],
    together: int,
    ld_alpha: float | None = None,
) -> Targets:
    """With a reference that gives every response a log-prob of 0, rows of weight 1, and no baseline."""
    lens = batch.response_lens
    count = batch.num_response_tokens
    return Targets(
        losses,
        member=torch.repeat_interleave(torch.arange(batch.num_samples), lens),
        token_weights=_token_weights(batch, ld_alpha),
        mean_weights=torch.full((count,), 1 / max(1, count)),
        reference=torch.zeros(batch.num_samples, dtype=torch.float64),
        tokens=lens.double(),
        labels=batch.scores > 0.5,
        together=together,
        row_weights=torch.ones(batch.num_samples // together, dtype=torch.float64),
        kl=torch.zeros((), dtype=torch.float64),
    )


def _token_weights(batch: Rollout, ld_alpha: float | None) -> Tensor:
    """[R] float64. With ld_alpha the tokens of a pair's longer response count that much behind the other's length (LD-
    DPO, arXiv 2409.06411)."""
    if ld_alpha is None:
        return torch.ones(batch.num_response_tokens, dtype=torch.float64)
    lens = batch.response_lens
    shorter = lens.view(-1, 2).amin(1).repeat_interleave(2)
    place = torch.arange(batch.num_response_tokens) - (lens.cumsum(0) - lens).repeat_interleave(lens)
    return torch.where(place < shorter.repeat_interleave(lens), 1.0, ld_alpha).double()


def one_pass(on_host: Targets, total_over_context: Callable[[Tensor], Tensor], context: int) -> Loss:
    """For losses of single rows. context: ranks that hold parts of the same responses; each has the whole value, and
    reports its share."""
    t = on_host.to(platform.device())

    def compute(output: Tensor, dest: Tensor) -> LossParts:
        local = t.sums(output[0], dest)
        counts = torch.zeros_like(t.reference).index_add(0, t.member[dest], torch.ones_like(t.token_weights[dest]))
        whole, counts = total_over_context(torch.stack([local.detach(), counts]))
        is_here = counts > 0
        policy = torch.where(is_here, whole + (local - local.detach()), t.reference)
        value = t.value(policy, is_here.view(-1, t.together).all(1))
        shared = value.detach() / context + (value - value.detach())
        return LossParts(shared.float(), [(t.mean_weights[dest] * output[1].detach()).sum()])

    return Loss(compute, ("actor/entropy",), together=t.together)


def two_pass(on_host: Targets, policy: Tensor) -> tuple[Loss, float]:
    """The second pass's loss, and the value of the whole. policy [B]: the sums of the first pass."""
    sums = policy.detach().clone().requires_grad_()
    value = on_host.value(sums)
    [slope] = torch.autograd.grad(value, sums)
    weights = (slope[on_host.member] * on_host.token_weights).float().to(platform.device())
    mean = on_host.mean_weights.to(platform.device())

    def compute(output: Tensor, dest: Tensor) -> LossParts:
        entropy = (mean[dest] * output[1].detach()).sum()
        return LossParts((weights[dest] * output[0]).sum(), [entropy])

    return Loss(compute, ("actor/entropy",)), float(value.detach())
