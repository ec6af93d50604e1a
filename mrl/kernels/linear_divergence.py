"""Divergence of each row between a student's and a teacher's distribution, without storing [n, vocab] tensors.

Chunks, vocabulary-parallel weights and padding are as in `linear_logprob`. The teacher's logits of a chunk are computed
beside the student's, or the teacher is known by the log-probs of its most likely tokens (`TopTokens`). The loss is
linear in the divergences with known weights, so the forward pass forms the gradients, and the backward pass multiplies
them by one number.
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


LEAST_REST = 1e-6  # probability outside the top tokens: float32 log-probs do not tell less from 0
NEVER = -1e4  # log-prob of an outcome that counts for nothing: exp() is 0


@dataclass(frozen=True)
class TopTokens:
    """A teacher's most likely tokens at n positions, at the student's temperature.

    The divergence is that of k + 1 outcomes: the k tokens, and any other token, whose probability is 1 minus their sum,
    at least LEAST_REST for the teacher.

    ids [n, k] int64: global vocabulary ids, distinct in a row; -1: no token. log_probs [n, k] float32
    """

    ids: Tensor
    log_probs: Tensor

    def at(self, rows: slice | Tensor) -> TopTokens:
        return TopTokens(self.ids[rows], self.log_probs[rows])


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher: tuple[Tensor, Tensor] | TopTokens,
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
    gradient, or its top tokens. The gradient of `hidden` holds only this rank's vocabulary part, as in
    `linear_log_prob`.
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
        teacher: tuple[Tensor, Tensor] | TopTokens,
        divergence: Divergence,
        token_weights: Tensor,
        place: CallParameters,
    ) -> Tensor:
        labels = torch.zeros(hidden.size(0), dtype=torch.int64, device=hidden.device)  # no label is asked for
        student = HeadPass(hidden, weight, labels, place, ctx.needs_input_grad[1])
        frozen = None
        if not isinstance(teacher, TopTokens):
            frozen = HeadPass(*teacher, labels, replace(place, products=plain_products))
        wide = torch.promote_types(hidden.dtype, torch.float32)
        found, token_weights = labels.to(wide), token_weights.to(wide)
        for rows in student.chunks():
            x = student.logits(rows)
            of_student = _Logits(x, student.statistics(rows, x), place.temperature)
            both: _WholeVocabulary | _TopOutcomes
            if frozen is not None:
                y = frozen.logits(rows)
                both = _WholeVocabulary(of_student, _Logits(y, frozen.statistics(rows, y), place.temperature), place)
            else:
                assert isinstance(teacher, TopTokens)
                both = _TopOutcomes.of(of_student, teacher.at(rows), place)
            found[rows], slope_sums = both.sums(divergence).to(wide)
            scale = token_weights[rows] / place.temperature
            student.add(rows, x, partial(both.write_gradient, divergence, slope_sums, scale))
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
    """Logits x [k, V] of a chunk of rows, with their statistics."""

    x: Tensor
    of: RowStatistics
    temperature: float

    def blocks(self) -> Iterator[slice]:
        """Yields blocks of rows whose log-probs are computed at once."""
        rows = max(1, (BLOCK_GPU if self.x.is_cuda else BLOCK) // self.x.size(1))
        yield from (slice(start, start + rows) for start in range(0, self.x.size(0), rows))

    def log_probs(self, at: slice) -> Tensor:
        return self._scaled(self.x[at], at)

    def log_probs_of(self, columns: Tensor) -> Tensor:
        """Returns float64 [k, m]. columns [k, m] int64"""
        return self._scaled(self.x.gather(1, columns), slice(None)).double()

    def _scaled(self, logits: Tensor, at: slice) -> Tensor:
        wide = logits.to(self.of.top.dtype) - self.of.top[at, None]
        return wide.div_(self.temperature).add_(self.of.shift[at, None])


@dataclass(frozen=True)
class _WholeVocabulary:
    """Both distributions over the vocabulary."""

    student: _Logits
    teacher: _Logits
    place: CallParameters

    def sums(self, divergence: Divergence) -> Tensor:
        """Returns float64 [2, k]: the sums of both of `Divergence.terms`."""
        x = self.student.x
        sums = torch.zeros(2, x.size(0), dtype=torch.float64, device=x.device)
        for at in self.student.blocks():
            terms = divergence.terms(self.student.log_probs(at), self.teacher.log_probs(at))
            sums[:, at] = torch.stack([each.sum(-1, dtype=torch.float64) for each in terms])
        if self.place.group is not None:
            dist.all_reduce(sums, group=self.place.group)
        return sums

    def write_gradient(self, divergence: Divergence, slope_sums: Tensor, scale: Tensor, out: Tensor) -> None:
        """Writes the gradient of the student's logits, times `scale` [k], to `out` [k, V], which may be the logits."""
        for at in self.student.blocks():
            log_q = self.student.log_probs(at)
            _, slope = divergence.terms(log_q, self.teacher.log_probs(at))
            out[at] = (slope - log_q.exp_() * slope_sums[at, None]) * scale[at, None]


@dataclass(frozen=True)
class _TopOutcomes:
    """Both distributions over the teacher's top tokens and any other token.

    columns [k, m] int64: of the tokens among this rank's logits; mine [k, m] bool: this rank has them
    log_q, log_p: float64 [k, m + 1]
    """

    student: _Logits
    columns: Tensor
    mine: Tensor
    log_q: Tensor
    log_p: Tensor

    @classmethod
    def of(cls, student: _Logits, teacher: TopTokens, place: CallParameters) -> _TopOutcomes:
        """Builds it for the rows of `student`. Collective over the tensor-parallel group."""
        width = student.x.size(1)
        columns = teacher.ids - place.vocab_start
        known = (teacher.ids >= 0) & (teacher.ids < place.vocab_size)
        mine = known & (columns >= 0) & (columns < width)
        columns = columns.clamp(0, width - 1)
        made = cls(student, columns, mine, torch.empty(0), torch.empty(0))
        rest = [made._others(at).exp_().sum(-1, dtype=torch.float64) for at in student.blocks()]
        log_q = torch.where(mine, student.log_probs_of(columns), 0)
        found = torch.cat([log_q, torch.cat(rest)[:, None]], 1)
        if place.group is not None:
            dist.all_reduce(found, group=place.group)
        log_q, of_rest = found[:, :-1], found[:, -1:]
        log_p = torch.where(known, teacher.log_probs.double(), NEVER)
        left = 1 - log_p.exp().sum(-1, keepdim=True)
        return replace(
            made,
            log_q=torch.cat([torch.where(known, log_q, NEVER), of_rest.clamp(min=1e-30).log()], 1),
            log_p=torch.cat([log_p, left.clamp(min=LEAST_REST).log()], 1),
        )

    def sums(self, divergence: Divergence) -> Tensor:
        """Returns as `_WholeVocabulary.sums`."""
        return torch.stack([each.sum(-1) for each in divergence.terms(self.log_q, self.log_p)])

    def write_gradient(self, divergence: Divergence, slope_sums: Tensor, scale: Tensor, out: Tensor) -> None:
        """Writes as `_WholeVocabulary.write_gradient`. A token outside the top has its share of their outcome."""
        slope = divergence.terms(self.log_q, self.log_p)[1] - self.log_q.exp() * slope_sums[:, None]
        own = torch.where(self.mine, slope[:, :-1], 0)
        each = slope[:, -1] / self.log_q[:, -1].exp()
        for at in self.student.blocks():
            made = self._others(at).exp_().mul_(each[at, None].to(self.student.of.top.dtype))
            made.scatter_add_(1, self.columns[at], own[at].to(made.dtype))
            out[at] = made * scale[at, None]

    def _others(self, at: slice) -> Tensor:
        """Returns the student's log-probs of a block, -inf for the top tokens."""
        log_q = self.student.log_probs(at)
        return log_q.scatter_add_(1, self.columns[at], torch.where(self.mine[at], -torch.inf, 0.0).to(log_q.dtype))
