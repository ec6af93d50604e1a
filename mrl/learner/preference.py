"""Preference losses over a step's batch: the sums they depend on, and their gradients.

One pass: whole rows lie in one micro-batch, which sums its own tokens. Context-parallel ranks add up their partial
sums;
gradients stay local. Two passes: the first computes all sums, and the loss's derivative by each sum then weights
the tokens of the second pass, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrl import platform
from mrl.algo.preference import PAIR_LOSSES, LogProbSums, PreferencePairs
from mrl.algo.preference_unpaired import LABEL_LOSSES, LabelledResponses
from mrl.algo.registry import arguments
from mrl.core import Rollout
from mrl.learner.loss_terms import Loss, LossParts
from mrl.models.batch import PassOptions
from mrl.options.preference import PreferenceOptions

DESCRIBED = PassOptions(described=True)


@dataclass(frozen=True)
class PreferenceTargets:
    """Targets of a step of B responses; the sums are float64.

    losses: by name
    member [R] int64: the response that each token belongs to, or is in the prompt of if prompts are trained on too
    token_weights [2, R]: the token's weight in its response's sum, and in the sum of the text that `sft` trains on
    mean_weights [R]: weights of the mean over the responses' tokens
    reference [B]: sums; tokens [B]: numbers; labels [B] bool: chosen, or labelled true
    together: responses of a row; row_weights: of the B / together rows
    kl, shift: as in `mrl.algo.preference_unpaired.LabelledResponses`
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

    def to(self, device: torch.device) -> PreferenceTargets:
        """Moves each tensor to the device."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def sums(self, log_probs: Tensor, places: Tensor | slice = slice(None)) -> Tensor:
        """Returns the sums [2, B] float64 of the tokens at `places` [n], given their log-probs [n]."""
        weighed = self.token_weights[:, places] * log_probs.double()
        return self.reference.new_zeros(2, self.reference.numel()).index_add(1, self.member[places], weighed)

    @property
    def text_tokens(self) -> Tensor:
        """Number of tokens that `sft` trains on, 0-d."""
        return self.token_weights[1].sum()

    def described(self) -> dict[str, tuple[int, Tensor]]:
        """Returns the means over response tokens that a step reports, by TRL's names: (index of the model output,
        each token's weight [R]).
        """
        found = {"actor/entropy": (1, self.mean_weights)}
        for half, of in (("chosen", self.labels), ("rejected", ~self.labels)):
            if of.any():
                weights = self.mean_weights * of[self.member]
                weights = weights / weights.sum()
                found[f"logits/{half}"] = (3, weights)
                if half == "chosen":
                    found["dpo/mean_token_accuracy"] = (2, weights)
        return found

    def pairs(self, policy: Tensor) -> PreferencePairs:
        """Returns the pairs, from the sums [2, B]."""
        parts = [(x[0::2], x[1::2]) for x in (policy[0], self.reference, self.tokens)]
        chosen, rejected = (LogProbSums(*(part[half] for part in parts)) for half in (0, 1))
        return PreferencePairs(chosen, rejected, policy[1, 0::2], self.text_tokens)

    def by_loss(self, policy: Tensor) -> dict[str, Tensor]:
        """Returns every loss of every row, [B / together] each, from the policy's sums [2, B], without the losses'
        weights.
        """
        found = {}
        for name, options in self.losses.items():
            if options.is_unpaired:
                loss: Callable[..., Tensor] = LABEL_LOSSES.get(name)
                of: LabelledResponses | PreferencePairs = LabelledResponses(
                    LogProbSums(policy[0], self.reference, self.tokens), self.labels, self.kl, self.shift
                )
            else:
                loss, of = PAIR_LOSSES.get(name), self.pairs(policy)
            found[name] = self.row_weights * loss(of, **arguments(loss, dict(options)))
        return found

    def value(self, policy: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns the weighted sum of the losses' means over the step's rows, 0-d; for `rows` bool only their share
        of it.
        """
        total = torch.zeros_like(self.row_weights)
        for name, values in self.by_loss(policy).items():
            total = total + self.losses[name].weight * values
        return (total if rows is None else torch.where(rows, total, 0.0)).sum() / total.numel()


def targets(
    batch: Rollout,
    losses: Mapping[str, PreferenceOptions],
    together: int,
    ld_alpha: float | None = None,
    with_prompts: bool = False,
) -> PreferenceTargets:
    """Returns targets with reference log-probs of 0, row weights of 1, and no baseline.

    with_prompts: the tokens are those of `mrl.data.preference.with_prompts(batch)`
    """
    labels, lens = batch.scores > 0.5, batch.response_lens
    before = (batch.prompt_lens - 1).clamp(min=0) * labels * int(with_prompts)
    rows = before + lens
    member = torch.repeat_interleave(torch.arange(batch.num_samples), rows)
    place = torch.arange(int(rows.sum())) - (rows.cumsum(0) - lens)[member]
    return PreferenceTargets(
        losses,
        member=member,
        token_weights=torch.stack([_response_weights(place, member, lens, ld_alpha), labels[member].double()]),
        mean_weights=(place >= 0) / max(1, batch.num_response_tokens),
        reference=torch.zeros(batch.num_samples, dtype=torch.float64),
        tokens=lens.double(),
        labels=labels,
        together=together,
        row_weights=torch.ones(batch.num_samples // together, dtype=torch.float64),
        kl=torch.zeros((), dtype=torch.float64),
    )


def _response_weights(place: Tensor, member: Tensor, lens: Tensor, ld_alpha: float | None) -> Tensor:
    """Returns token weights [R] float64; `place` is the index in the response, negative in the prompt.

    With ld_alpha, the tokens of a pair's longer response beyond the other's length have that weight (LD-DPO, arXiv
    2409.06411).
    """
    weights = (place >= 0).double()
    if ld_alpha is None:
        return weights
    shorter = lens.view(-1, 2).amin(1).repeat_interleave(2)
    return torch.where(place < shorter[member], weights, ld_alpha)


def one_pass(on_host: PreferenceTargets, total_over_context: Callable[[Tensor], Tensor], context: int) -> Loss:
    """Returns the loss for losses of single rows.

    context: number of ranks that hold parts of the same responses; each has the whole value, and reports its share.
    """
    t, (names, means) = on_host.to(platform.device()), _means(on_host)

    def compute(output: Tensor, dest: Tensor) -> LossParts:
        local = t.sums(output[0], dest)
        counts = torch.zeros_like(t.reference).index_add(0, t.member[dest], t.reference.new_ones(dest.numel()))
        *whole, counts = total_over_context(torch.cat([local.detach(), counts[None]]))
        is_here = counts > 0
        nothing = torch.stack([t.reference, torch.zeros_like(t.reference)])
        policy = torch.where(is_here, torch.stack(whole) + (local - local.detach()), nothing)
        value = t.value(policy, is_here.view(-1, t.together).all(1))
        shared = value.detach() / context + (value - value.detach())
        return LossParts(shared.float(), means(output, dest))

    return Loss(compute, names, together=t.together, extras=DESCRIBED)


def two_pass(on_host: PreferenceTargets, policy: Tensor) -> tuple[Loss, float]:
    """Returns the second pass's loss and the total value. policy [2, B]: the sums of the first pass."""
    sums = policy.detach().clone().requires_grad_()
    value = on_host.value(sums)
    [slope] = torch.autograd.grad(value, sums)
    weights = (slope[:, on_host.member] * on_host.token_weights).sum(0).float().to(platform.device())
    names, means = _means(on_host)

    def compute(output: Tensor, dest: Tensor) -> LossParts:
        return LossParts((weights[dest] * output[0]).sum(), means(output, dest))

    return Loss(compute, names, extras=DESCRIBED), float(value.detach())


def _means(on_host: PreferenceTargets) -> tuple[tuple[str, ...], Callable[[Tensor, Tensor], list[Tensor]]]:
    """Returns the names of a step's token metrics, and the function whose results add up to their values."""
    described = on_host.described()
    kept = [(output, weights.to(platform.device())) for output, weights in described.values()]

    def means(output: Tensor, dest: Tensor) -> list[Tensor]:
        return [(weights[dest] * output[which].detach()).sum() for which, weights in kept]

    return tuple(described), means
