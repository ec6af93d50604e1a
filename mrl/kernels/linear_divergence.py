"""Divergence of each row between a student's and a teacher's distribution, without storing [n, vocab] tensors.

Chunks, vocabulary-parallel weights and padding are as in `linear_logprob`. The teacher's logits of a chunk are computed
beside the student's. The loss is linear in the divergences with known weights, so the forward pass forms the
gradients, and the backward pass multiplies them by one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.kernels.head_chunks import BLOCK, BLOCK_GPU
from mrl.kernels.head_products import Products, plain_products
from mrl.kernels.head_rows import RowStatistics
from mrl.kernels.linear_logprob import CallParameters, HeadPass, common_factor, if_parallel


@dataclass(frozen=True)
class Divergence:
    """Divergence between a teacher p and a student q.

    reverse_kl: KL(q || p); forward_kl: KL(p || q);
    jsd: mix KL(p || m) + (1 - mix) KL(q || m) with m = mix p + (1 - mix) q (GKD, arXiv 2306.13649);
    skewed_kl: KL(p || mix p + (1 - mix) q); skewed_reverse_kl: KL(q || (1 - mix) p + mix q) (DistiLLM, arXiv
    2402.03898)
    """

    kind: str
    mix: float = 0.5

    def terms(self, log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each vocabulary entry's term of the divergence, and q times the divergence's derivative by q up to
        a constant times q, which has no effect on logits. Both have the shape of log_q.
        """
        p, q = log_p.exp(), log_q.exp()
        if self.kind == "reverse_kl":
            term = q * (log_q - log_p)
            return term, term
        if self.kind == "forward_kl":
            return p * (log_p - log_q), -p
        of_p = 1 - self.mix if self.kind == "skewed_reverse_kl" else self.mix
        log_m = torch.logaddexp(log_p + math.log(of_p), log_q + math.log1p(-of_p))
        if self.kind == "jsd":
            of_q = (1 - self.mix) * q * (log_q - log_m)
            return self.mix * p * (log_p - log_m) + of_q, of_q
        if self.kind == "skewed_kl":
            return p * (log_p - log_m), (of_p - 1) * q * (log_p - log_m).exp()
        if self.kind != "skewed_reverse_kl":
            raise ValueError(f"there is no divergence {self.kind!r}")
        term = q * (log_q - log_m)
        return term, term - self.mix * q * (log_q - log_m).exp()


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher: tuple[Tensor, Tensor],
    divergence: Divergence,
    token_weights: Tensor,
    temperature: float,
    vocab_start: int,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None = None,
    chunk: int | None = None,
    products: Products = plain_products,
) -> Tensor:
    """Returns float32 [n]: the divergence of each row between the distributions of student and teacher, both of
    softmax(logits / temperature) over the first `vocab_size` ids.

    hidden [n, h] and weight [V/tp, h]: the student's; teacher: its hidden states [n, g] and weight [V/tp, g], without
    gradient. The gradient of `hidden` holds only this rank's vocabulary part, as in `linear_log_prob`.
    token_weights [n]: gradient of the loss by each divergence, up to a factor that all rows share. The backward pass
    raises RuntimeError if the loss has other gradients.
    """
    place = CallParameters(temperature, vocab_start, vocab_size, if_parallel(tp_group), chunk, products)
    found: Tensor = _Divergence.apply(hidden, weight, teacher, divergence, token_weights, place)
    return found


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher: tuple[Tensor, Tensor],
        divergence: Divergence,
        token_weights: Tensor,
        place: CallParameters,
    ) -> Tensor:
        labels = torch.zeros(hidden.size(0), dtype=torch.int64, device=hidden.device)  # no label is asked for
        student = HeadPass(hidden, weight, labels, place, ctx.needs_input_grad[1])
        frozen = HeadPass(*teacher, labels, replace(place, products=plain_products))
        wide = torch.promote_types(hidden.dtype, torch.float32)
        found, token_weights = labels.to(wide), token_weights.to(wide)
        for rows in student.chunks():
            x, y = student.logits(rows), frozen.logits(rows)
            logits = _Logits(x, student.statistics(rows, x), y, frozen.statistics(rows, y), place.temperature)
            sums = torch.zeros(2, x.size(0), dtype=torch.float64, device=x.device)
            for at, log_q, log_p in logits.blocks():
                sums[:, at] = torch.stack(
                    [each.sum(-1, dtype=torch.float64) for each in divergence.terms(log_q, log_p)]
                )
            if place.group is not None:
                dist.all_reduce(sums, group=place.group)
            found[rows], slope_sums = sums.to(wide)
            scale = token_weights[rows] / place.temperature
            student.add(rows, x, partial(logits.write_gradient, divergence, slope_sums, scale))
        student.close()
        ctx.student = student
        ctx.save_for_backward(token_weights)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.student is None:
            raise RuntimeError("gradients computed in the forward pass can be used only once")
        (expected,) = ctx.saved_tensors
        student, ctx.student = ctx.student, None
        return *student.gradients(common_factor(expected, grad)), None, None, None, None


@dataclass(frozen=True)
class _Logits:
    """Logits [k, V] of a chunk of rows, x the student's and y the teacher's, with their statistics."""

    x: Tensor
    of_x: RowStatistics
    y: Tensor
    of_y: RowStatistics
    temperature: float

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields blocks of rows with the student's and the teacher's log-probs."""
        rows = max(1, (BLOCK_GPU if self.x.is_cuda else BLOCK) // self.x.size(1))
        for start in range(0, self.x.size(0), rows):
            at = slice(start, start + rows)
            yield at, self._log_probs(self.x, self.of_x, at), self._log_probs(self.y, self.of_y, at)

    def _log_probs(self, logits: Tensor, of: RowStatistics, at: slice) -> Tensor:
        wide = logits[at].to(of.top.dtype) - of.top[at, None]
        return wide.div_(self.temperature).add_(of.shift[at, None])

    def write_gradient(self, divergence: Divergence, slope_sums: Tensor, scale: Tensor, out: Tensor) -> None:
        """Writes the gradient of x, times `scale` [k], to `out` [k, V], which may be x."""
        for at, log_q, log_p in self.blocks():
            _, slope = divergence.terms(log_q, log_p)
            out[at] = (slope - log_q.exp_() * slope_sums[at, None]) * scale[at, None]
