"""Likelihood of held-out rows as sums over all their tokens, so results do not depend on batches or ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mrl.core import Rollout
from mrl.learner.learner import Learner

LARGEST = 700.0  # nats whose exponential is a float64


@dataclass
class Likelihood:
    """Sums over tokens, weighted by each token's count.

    nll: negative log-likelihood; right: argmax predictions; counts: 1; tokens: number of counted tokens
    """

    nll: float = 0.0
    right: float = 0.0
    counts: float = 0.0
    tokens: int = 0

    def metrics(self, name: str, after: str = "") -> dict[str, float]:
        """Returns NAME/loss, its exponential NAME/perplexity, and NAME/token_accuracy."""
        loss = self.nll / self.counts
        found = {
            "loss": loss,
            "perplexity": math.exp(min(loss, LARGEST)),
            "token_accuracy": self.right / self.counts,
        }
        return {f"{name}/{key}{after}": value for key, value in found.items()}


def likelihood(
    learner: Learner, batches: Iterable[tuple[Sequence[str | None], Rollout]]
) -> dict[str | None, Likelihood]:
    """Returns the likelihood by kind of row, and of all rows under None. Collective.

    batches: (kinds, one a sample; the samples) for each batch
    """
    found: dict[str | None, Likelihood] = {None: Likelihood()}
    for kinds, batch in batches:
        log_probs, is_likeliest = learner.predictions(batch)
        counts = torch.ones_like(log_probs) if batch.loss_weights is None else batch.loss_weights
        counts = counts.double()
        columns = torch.stack([-counts * log_probs, counts * is_likeliest, counts, (counts > 0).double()])
        member = torch.repeat_interleave(torch.arange(batch.num_samples), batch.response_lens)
        sums = torch.zeros(4, batch.num_samples, dtype=torch.float64).index_add_(1, member, columns)
        for kind in dict.fromkeys([None, *kinds]):
            mine = torch.tensor([kind is None or other == kind for other in kinds])
            nll, right, total, tokens = sums[:, mine].sum(1).tolist()
            of = found.setdefault(kind, Likelihood())
            of.nll, of.right, of.counts = of.nll + nll, of.right + right, of.counts + total
            of.tokens += int(tokens)
    return found


def metrics(found: dict[str | None, Likelihood], name: str) -> dict[str, float]:
    """Returns NAME/loss, NAME/perplexity, NAME/token_accuracy and NAME/tokens over all rows.

    If rows are of several kinds, adds NAME/loss/KIND and the others for each kind.
    """
    made = found[None].metrics(name) | {f"{name}/tokens": float(found[None].tokens)}
    kinds = {kind: of for kind, of in found.items() if kind is not None}
    if len(kinds) > 1 or any(of.tokens < found[None].tokens for of in kinds.values()):
        for kind in sorted(kinds):
            made |= kinds[kind].metrics(name, f"/{kind}")
    return made
