"""Row statistics of the loss head's logits, and the logits' gradient from them.

A rank holds a part x [k, V] of k rows' logits, in float32 or the hidden states' dtype. With z = x - its own maximum,
divided by the temperature T, five sums a rank describe a row's distribution, and one collective combines them. They are
float64: beside the maximum's own 1 the rest of a sum keeps its digits, so neither large logits nor a log-prob near 0
lose precision, and no log-prob is above 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.kernels import triton_support
from mrl.kernels.head_chunks import BLOCK, BLOCK_GPU
from mrl.kernels.native import head as native


def by_triton(x: Tensor) -> bool:
    """Returns True if `mrl.kernels.head_rows_triton` processes logits x [k, V]."""
    return x.is_cuda and x.size(1) > 0 and x.dtype != torch.float64 and triton_support.is_chosen()


class RowKernels(Protocol):
    """Interface of a module of compiled kernels. x: logits [k, V]; all vectors [k]."""

    def sums(self, x: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Returns (top [k] float32: each row's maximum; float64 [3, k]: the sums of e^z, z e^z and e^2z), leaving x
        unchanged.

        z = (x - top) / temperature.
        """

    def gradient(
        self,
        x: Tensor,
        top: Tensor,
        shift: Tensor,
        entropy: Tensor,
        temperature: float,
        d_log_probs: Tensor,
        d_entropy: Tensor | None,
        column: Tensor,
        own: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Writes -p * (d_log_probs + d_entropy * (log p + entropy)), plus `own` at `column`, to `out` [k, V], which may
        be x.

        log p = (x - top) / temperature + shift
        """


def _compiled(x: Tensor) -> RowKernels | None:
    """Returns the kernels that process logits x; None for torch."""
    if by_triton(x):
        from mrl.kernels import head_rows_triton

        return head_rows_triton
    return native if native.supports(x) else None


@dataclass(frozen=True)
class LabelColumns:
    """Label positions of k rows: column [k] among this rank's columns, and mine [k] bool, True if this rank holds
    it.
    """

    column: Tensor
    mine: Tensor

    @classmethod
    def of(cls, labels: Tensor, vocab_start: int, valid: int) -> LabelColumns:
        """Builds the positions of labels [k]; valid: this rank's columns without padding."""
        column = labels - vocab_start
        return cls(column.clamp(0, max(valid - 1, 0)), (column >= 0) & (column < valid))

    def at(self, rows: slice) -> LabelColumns:
        return LabelColumns(self.column[rows], self.mine[rows])


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of k rows over the whole vocabulary, each [k] float32 (float64 for float64 logits).

    squares: sums of the squared probabilities, if requested
    is_top: 1 where the label is the argmax, else 0
    top: maximum of this rank's logits before the temperature; shift: log p = z + shift
    """

    log_probs: Tensor
    entropy: Tensor
    squares: Tensor
    is_top: Tensor
    top: Tensor
    shift: Tensor

    def at(self, rows: slice) -> RowStatistics:
        return RowStatistics(*(vector[rows] for vector in vars(self).values()))


def statistics(
    x: Tensor,
    labels: LabelColumns,
    temperature: float,
    group: dist.ProcessGroup | None,
    *,
    exponential: bool = False,
    squares: bool = False,
) -> RowStatistics:
    """Returns the statistics of logits x [k, V]. group: None if x covers the whole vocabulary.

    exponential: overwrites x with e^z, except with compiled kernels.
    """
    picked = x.gather(1, labels.column[:, None])[:, 0].double() / temperature
    if (compiled := _compiled(x)) is not None:
        top, (total, weighted, square) = compiled.sums(x, temperature)
        own = torch.where(labels.mine, picked, 0)
        return _together(torch.stack([top.double() / temperature, total, own, weighted, square]), top, group)
    top = x.new_empty(x.size(0), dtype=_wide(x))
    sums = torch.zeros(5, x.size(0), dtype=torch.float64, device=x.device)
    for block, y, room, rows in _blocks(x):
        top[rows] = block.amax(-1)
        e = _exponentials(block, top[rows], temperature, y, block if exponential else room)
        sums[1, rows] = e.sum(-1, dtype=torch.float64)
        if squares:
            sums[4, rows] = torch.linalg.vector_norm(e, dim=-1).double().square()
        sums[3, rows] = y.mul_(e).sum(-1).double() * math.log(2)
    sums[0], sums[2] = top.double() / temperature, torch.where(labels.mine, picked, 0)
    return _together(sums, top, group)


def _exponentials(logits: Tensor, top: Tensor, temperature: float, y: Tensor, out: Tensor) -> Tensor:
    """Fills `out` with e^z and y with z / log(2): exp2 costs a third of exp on processors."""
    y.copy_(logits).sub_(top[:, None]).mul_(math.log2(math.e) / temperature)
    return torch.exp2(y, out=out)


def _together(sums: Tensor, own_top: Tensor, group: dist.ProcessGroup | None) -> RowStatistics:
    """Combines the ranks' sums [5, k] float64 into the statistics.

    sums: maximum, sum of e^z, the label's logit (0 if another rank has it), sums of z e^z and of e^2z of this rank;
    own_top [k]: this rank's maximum before the temperature.
    """
    parts = sums[None]
    if group is not None:
        parts = sums.new_empty(group.size(), *sums.shape)
        dist.all_gather_into_tensor(parts.view(-1, sums.size(1)), sums, group=group)
    tops, totals, picked, weighted, squares = parts.unbind(1)
    top = tops.amax(0)
    below = tops - top
    scale = below.exp()
    total = (scale * totals).sum(0)
    log_sum = (total - 1).log1p()
    mean = (scale * (weighted + below * totals)).sum(0) / total
    rows = (
        picked.sum(0) - top - log_sum,
        log_sum - mean,
        (scale.square() * squares).sum(0) / total.square(),
        picked.sum(0) == top,
        own_top,
        sums[0] - top - log_sum,
    )
    return RowStatistics(*(row.to(own_top.dtype) for row in rows))


def d_logits(
    x: Tensor,
    rows: RowStatistics,
    labels: LabelColumns,
    temperature: float,
    loss_gradients: tuple[Tensor, Tensor | None],
    out: Tensor,
    *,
    exponential: bool = False,
) -> Tensor:
    """Writes the gradient of the logits to `out` [k, V], which may be x, rounded to its dtype.

    loss_gradients: the loss gradients by log-probs and entropies, [k] each; x: as passed to `statistics`, or as it left
    x if `exponential`.
    T d log_prob / dx = onehot(label) - p; T dH / dx = -p (log p + H)
    """
    d_log_probs, d_entropy = (None if slope is None else slope / temperature for slope in loss_gradients)
    assert d_log_probs is not None
    own, share = torch.where(labels.mine, d_log_probs, 0.0), -d_log_probs * rows.shift.exp()
    if (compiled := _compiled(x)) is not None:
        vectors = rows.top, rows.shift, rows.entropy
        return compiled.gradient(x, *vectors, temperature, d_log_probs, d_entropy, labels.column, own, out)
    for block, y, room, at in _blocks(x):
        made = out[at] if out.dtype == y.dtype else y
        if d_entropy is None:
            e = block if exponential else _exponentials(block, rows.top[at], temperature, y, room)
            torch.mul(e, share[at, None], out=made)
        else:
            log_p = y.copy_(block).sub_(rows.top[at, None]).div_(temperature).add_(rows.shift[at, None])
            p = torch.exp2(torch.mul(log_p, math.log2(math.e), out=room), out=room)
            log_p.add_(rows.entropy[at, None]).mul_(-d_entropy[at, None]).sub_(d_log_probs[at, None])
            torch.mul(log_p, p, out=made)
        made.scatter_add_(1, labels.column[at, None], own[at, None])
        if made is y:
            out[at].copy_(y)
    return out


def _blocks(x: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, slice]]:
    """Yields blocks of rows of x, two float32-or-wider buffers of their size, and the rows' slice."""
    elements = BLOCK if x.device.type == "cpu" else BLOCK_GPU
    rows = max(1, elements // x.size(1))
    one, other = x.new_empty(2, rows, x.size(1), dtype=_wide(x))
    for start in range(0, x.size(0), rows):
        block = x[start : start + rows]
        yield block, one[: block.size(0)], other[: block.size(0)], slice(start, start + rows)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
