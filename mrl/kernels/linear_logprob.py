"""Log-probability and entropy of each row from hidden states, without storing [n, vocab] logits.

Rows are processed in chunks: beyond inputs and gradients there is one [chunk, vocab / tp] block of logits.
Vocabulary-parallel: each rank holds the weight rows `vocab_start ... vocab_start + V/tp`; columns at or beyond
`vocab_size` are padding and have no probability.

Gradients are computed in one of two ways. If the loss of a token depends on that token's output alone, its loss
gradients are known as soon as the token's log-prob is: the forward pass then forms the gradients of `hidden` and
`weight`, chunk by chunk, with three matrix products in all, and the backward pass multiplies them by one number. For
other losses the backward pass computes a chunk's logits again, a fourth product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.kernels.head_chunks import chunk_rows, waiting_rows
from mrl.kernels.head_products import Operands, Products, plain_products
from mrl.kernels.head_rows import LabelColumns, RowStatistics, d_logits, statistics

_NOTHING = -1e20  # logit of padding: no probability at any temperature
_SAME = 1e-4  # relative tolerance of loss gradients, which are rounded twice


@dataclass(frozen=True)
class LossGradients:
    """of(log-probs [k], entropies [k], slice of the n rows) -> loss gradients by both, [k] each.

    They may lack a factor that all rows share. The second is None for the entropies unless `entropy`.
    """

    of: Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor | None]]
    entropy: bool = False


@dataclass(frozen=True)
class CallParameters:
    """Parameters of a call other than its tensors."""

    temperature: float
    vocab_start: int
    vocab_size: int
    group: dist.ProcessGroup | None
    chunk: int | None
    products: Products


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    vocab_start: int,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None = None,
    chunk: int | None = None,
    products: Products = plain_products,
    loss_gradients: LossGradients | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probs of `labels`, entropies of softmax(hidden @ weight.T / temperature), and, without gradient, 1
    where the label is the argmax, else 0.

    hidden [n, h], weight [V/tp, h], labels [n] int64 (global vocabulary ids) -> float32 [n], [n], [n].
    The gradient of `hidden` holds only this rank's vocabulary part: the caller sums it over the tensor-parallel group.
    chunk: rows processed at once; None: from the size of the vocabulary.
    products: implementation of the matrix products
    loss_gradients: loss gradients of the loss that will be computed from the results; None if the loss is not local to
    each token. The backward pass raises RuntimeError if the loss has other gradients.
    """
    place = CallParameters(temperature, vocab_start, vocab_size, if_parallel(tp_group), chunk, products)
    if loss_gradients is None or not torch.is_grad_enabled():
        out: tuple[Tensor, Tensor, Tensor] = _Recomputed.apply(hidden, weight, labels, place)
    else:
        out = _Formed.apply(hidden, weight, labels, place, loss_gradients)
    return out


@torch.no_grad()
def linear_distribution(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    vocab_start: int,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None = None,
    chunk: int | None = None,
    products: Products = plain_products,
) -> Tensor:
    """Returns float32 [4, n] without gradient: log-probs and entropies of `linear_log_prob`, the sums over the
    vocabulary of the squared probabilities, and 1 where the label is the argmax, else 0.
    """
    place = CallParameters(temperature, vocab_start, vocab_size, if_parallel(tp_group), chunk, products)
    made = HeadPass(hidden, weight, labels, place).all_statistics(squares=True)
    return torch.stack([made.log_probs, made.entropy, made.squares, made.is_top])


class HeadPass:
    """One pass over the rows, and the gradients formed so far.

    of_weight: True if the weight's gradient is needed; not for a frozen weight
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, place: CallParameters, of_weight: bool = False
    ) -> None:
        self._n, self._temperature, self._group = hidden.size(0), place.temperature, place.group
        self._valid = max(0, min(weight.size(0), place.vocab_size - place.vocab_start))
        self._labels = LabelColumns.of(labels, place.vocab_start, self._valid)
        self._operands: Operands = place.products(hidden, weight)
        width, on_gpu = self._operands.logits_dtype.itemsize, weight.device.type != "cpu"
        self._chunk = place.chunk or chunk_rows(weight.size(0), width, on_gpu=on_gpu)
        self._hidden, self._weight, self._of_weight = hidden, weight, of_weight
        self._d_weight: Tensor | None = None
        self._d_hidden = torch.empty_like(hidden, dtype=self._operands.gradient_dtype)
        self._waiting: Tensor | None = None  # gradients of logits
        self._multiplied = 0  # rows with finished gradients

    def chunks(self) -> list[slice]:
        return [slice(start, start + self._chunk) for start in range(0, self._n, self._chunk)]

    def all_statistics(self, squares: bool = False) -> RowStatistics:
        found = [self.statistics(rows, self.logits(rows), squares=squares) for rows in self.chunks()]
        empty = torch.empty(0, dtype=torch.float32, device=self._hidden.device)
        columns = zip(*(vars(rows).values() for rows in found)) if found else [(empty,)] * 6
        return RowStatistics(*(torch.cat(vectors) for vectors in columns))

    def logits(self, rows: slice) -> Tensor:
        x = self._operands.logits(rows)
        if self._valid < x.size(1):
            x[:, self._valid :] = _NOTHING
        return x

    def statistics(self, rows: slice, x: Tensor, **how: bool) -> RowStatistics:
        return statistics(x, self._labels.at(rows), self._temperature, self._group, **how)

    def add_gradients(
        self, rows: slice, x: Tensor, found: RowStatistics, loss_gradients: tuple[Tensor, Tensor | None], **how: bool
    ) -> None:
        """Adds gradients of a chunk. x, how: as in `d_logits`."""
        labels = self._labels.at(rows)
        self.add(rows, x, lambda out: d_logits(x, found, labels, self._temperature, loss_gradients, out, **how))

    def add(self, rows: slice, x: Tensor, write: Callable[[Tensor], object]) -> None:
        """Adds gradients of a chunk, which `write` puts into a buffer like x, or x itself.

        Chunks come in order, and are buffered until they are multiplied together.
        """
        room, first = self._room(x), self._multiplied
        start, stop = rows.start - first, rows.start - first + x.size(0)
        write(room[start:stop])
        if stop < room.size(0) and first + stop < self._n:
            return
        done, self._multiplied = slice(first, first + stop), first + stop
        self._d_hidden[done] = self._operands.d_hidden(room[:stop])
        if self._of_weight:
            self._d_weight = self._operands.add_d_weight(self._d_weight, room[:stop], done)

    def _room(self, x: Tensor) -> Tensor:
        """Buffer for the gradients of the rows from `_multiplied` on: x itself, or a narrower one."""
        dtype = self._operands.gradient_dtype
        if x.dtype == dtype:
            return x
        if self._waiting is None:
            rows = x.size(0)
            if self._operands.waits and self._of_weight:
                rows = waiting_rows(self._n, x.size(1), self._hidden.size(1), dtype.itemsize, self._chunk)
            self._waiting = x.new_empty(rows, x.size(1), dtype=dtype)
        return self._waiting

    def close(self) -> None:
        """Frees the buffers of chunks."""
        del self._operands, self._waiting

    def gradients(self, factor: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns the gradients of hidden and weight, in their dtypes, multiplied once by the factor."""
        made = [self._d_hidden]
        if self._of_weight:
            made.append(torch.zeros_like(self._weight) if self._d_weight is None else self._d_weight)  # None: no rows
        if factor is not None and (factor.is_cuda or factor != 1):  # there it costs more to look
            torch._foreach_mul_(made, factor)
        d_hidden, *d_weight = (gradient.to(self._weight.dtype) for gradient in made)
        return d_hidden, d_weight[0] if d_weight else None


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, place: CallParameters
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = HeadPass(hidden, weight, labels, place).all_statistics()
        ctx.save_for_backward(hidden, weight, labels, *vars(rows).values())
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(rows.is_top)
        ctx.place = place
        return rows.log_probs, rows.entropy, rows.is_top

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_log_probs, d_entropy, _ = grads  # None: the loss does not use that output
        hidden, weight, labels, *vectors = ctx.saved_tensors
        found = RowStatistics(*vectors)
        d_log_probs = torch.zeros_like(found.log_probs) if d_log_probs is None else d_log_probs
        work = HeadPass(hidden, weight, labels, ctx.place, ctx.needs_input_grad[1])
        for rows in work.chunks():
            loss_gradients = d_log_probs[rows], None if d_entropy is None else d_entropy[rows]
            work.add_gradients(rows, work.logits(rows), found.at(rows), loss_gradients)
        return *work.gradients(), None, None


class _Formed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, place: CallParameters, loss_gradients: LossGradients
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = HeadPass(hidden, weight, labels, place, ctx.needs_input_grad[1])
        wide = torch.promote_types(hidden.dtype, torch.float32)
        outputs, expected = torch.zeros(5, labels.numel(), dtype=wide, device=hidden.device).split([3, 2])
        for rows in work.chunks():
            x = work.logits(rows)
            exponential = not loss_gradients.entropy and x.dtype == torch.float32  # otherwise they would lose digits
            found = work.statistics(rows, x, exponential=exponential)
            outputs[:, rows] = torch.stack([found.log_probs, found.entropy, found.is_top])
            steep = loss_gradients.of(found.log_probs, found.entropy, rows)
            for kept, slope in zip(expected, steep):
                if slope is not None:
                    kept[rows] = slope
            work.add_gradients(rows, x, found, steep, exponential=exponential)
            del x  # frees it before the next chunk
        work.close()
        ctx.work = work
        ctx.save_for_backward(expected)
        ctx.set_materialize_grads(False)
        log_probs, entropy, is_top = outputs
        ctx.mark_non_differentiable(is_top)
        return log_probs, entropy, is_top

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.work is None:
            raise RuntimeError("gradients computed in the forward pass can be used only once")
        (expected,) = ctx.saved_tensors
        work, ctx.work = ctx.work, None
        loss_gradients = torch.stack([torch.zeros_like(expected[0]) if grad is None else grad for grad in grads[:2]])
        return *work.gradients(common_factor(expected, loss_gradients)), None, None, None


def common_factor(expected: Tensor, loss_gradients: Tensor) -> Tensor:
    """Returns the factor [] of the expected loss gradients [2, n]; non-finite gradients give a non-finite factor.

    Raises RuntimeError unless all have the same factor.
    """
    if expected.numel() == 0:
        return expected.new_ones(())
    place = expected.abs().argmax()
    largest = expected.view(-1)[place]
    factor = torch.where(largest == 0, 0.0, loss_gradients.view(-1)[place] / largest)
    wanted = expected * factor
    off = (loss_gradients - wanted).abs() > _SAME * (wanted.abs() + wanted.abs().amax())
    torch._assert_async(~off.any(), "the loss gradients differ from those used in the forward pass")
    return factor


def if_parallel(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return group if group is not None and group.size() > 1 else None
