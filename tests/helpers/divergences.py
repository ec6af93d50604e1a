"""Divergences between a teacher p and a student q as their papers define them: [..., vocabulary] -> [...]."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.helpers.slow import slow_cases

DIVERGENCES = [
    ("reverse_kl", 0.1),
    ("forward_kl", 0.1),
    ("jsd", 0.5),
    ("jsd", 0.2),
    ("skewed_kl", 0.1),
    ("skewed_reverse_kl", 0.1),
]


def with_one_teacher(processes: int) -> list[tuple[str, float]]:
    """Returns the divergences that a world of this size computes with one teacher. Two teachers get all of them."""
    return DIVERGENCES if processes == 1 else [*DIVERGENCES[:1], *slow_cases(*DIVERGENCES[1:])]


def top_outcomes(p: Tensor, q: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Returns p and q over the teacher's top_k tokens and "any other token": [..., top_k + 1] each."""
    ids = p.topk(top_k, -1).indices
    top_p, top_q = p.gather(-1, ids), q.gather(-1, ids)
    return tuple(torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (top_p, top_q))  # type: ignore[return-value]


def by_the_papers(kind: str, mix: float, p: Tensor, q: Tensor) -> Tensor:
    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a.log() - b.log())).sum(-1)

    if kind == "jsd":  # arXiv 2306.13649, section 2
        m = mix * p + (1 - mix) * q
        return mix * kl(p, m) + (1 - mix) * kl(q, m)
    return {
        "reverse_kl": kl(q, p),
        "forward_kl": kl(p, q),
        "skewed_kl": kl(p, mix * p + (1 - mix) * q),  # arXiv 2402.03898, equation 3
        "skewed_reverse_kl": kl(q, (1 - mix) * p + mix * q),
    }[kind]
