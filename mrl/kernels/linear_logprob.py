"""Hidden states -> log-probability and entropy of each row, without ever holding [n, vocab] logits.

Rows are worked through in chunks; the backward pass recomputes a chunk's logits from the saved row statistics, so peak
memory beyond inputs and gradients is one [chunk, vocab / tp] block. Vocabulary-parallel: each rank holds the weight
rows `vocab_start ... vocab_start + V/tp`; columns at or beyond `vocab_size` are padding and take no probability.

With z = logits / T - their maximum and p = softmax: log_prob = z_y - log sum(e^z), entropy H = log sum(e^z) - sum(p z),
sum p^2 = sum(e^2z) / sum(e^z)^2; d log_prob / dz = onehot(y) - p, dH / dz = -p (log p + H). The maximum is taken off
first, and its own 1 is left out of the sum for log1p: neither large logits nor a log-prob near 0 cost digits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.kernels.head_products import Operands, Plain, Products

_PADDING_LOGIT = -1e30
_CHUNK_ROWS = 1024  # at least: enough for matrix products at full speed
_CHUNK_MULTIPLE = 128  # of rows: no block of fp8 is cut by a chunk's end
_CHUNK_ELEMENTS = 1 << 21  # of logits, on a CPU: what stays in its caches. More rows a chunk while they are few
_CHUNK_ELEMENTS_GPU = 1 << 27  # half a GiB a float32 block, of which there are three: fewer, longer kernels


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    vocab_start: int,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None = None,
    chunk: int | None = None,
    products: Products = Plain,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `labels` and entropies of softmax(hidden @ weight.T / temperature).

    hidden [n, h], weight [V/tp, h], labels [n] int64 (global vocabulary ids) -> float32 [n], [n].
    The gradient of `hidden` holds only this rank's vocabulary part: the caller sums it over the tensor-parallel group.
    chunk: rows worked through at once; by the size of the vocabulary when None.
    products: who multiplies, and in what
    """
    chunk = chunk or _chunk_rows(weight)
    out: tuple[Tensor, Tensor] = _LinearLogProb.apply(
        hidden, weight, labels, temperature, vocab_start, vocab_size, _if_parallel(tp_group), chunk, products
    )
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
    products: Products = Plain,
) -> Tensor:
    """float32 [3, n]: the log-probs and entropies of `linear_log_prob`, and the sums over the vocabulary of the squared
    probabilities. No gradient."""
    valid = max(0, min(weight.size(0), vocab_size - vocab_start))
    chunk, group = chunk or _chunk_rows(weight), _if_parallel(tp_group)
    out = torch.empty(3, hidden.size(0), dtype=torch.float32, device=hidden.device)
    operands = products(hidden, weight)
    for s in range(0, hidden.size(0), chunk):
        rows = slice(s, s + chunk)
        x = _logits(operands, rows, temperature, valid)
        log_probs, _, entropy, squares = _row_statistics(x, labels[rows] - vocab_start, valid, group, squares=True)
        out[:, rows] = torch.stack([log_probs, entropy, squares])
    return out


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        vocab_start: int,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        chunk: int,
        products: Products,
    ) -> tuple[Tensor, Tensor]:
        n, operands = hidden.size(0), products(hidden, weight)
        log_probs, entropy, lse = (torch.empty(n, dtype=torch.float32, device=hidden.device) for _ in range(3))
        valid = max(0, min(weight.size(0), vocab_size - vocab_start))
        for s in range(0, n, chunk):
            rows = slice(s, s + chunk)
            x = _logits(operands, rows, temperature, valid)
            log_probs[rows], lse[rows], entropy[rows], _ = _row_statistics(x, labels[rows] - vocab_start, valid, group)
        ctx.save_for_backward(hidden, weight, labels, lse, entropy)
        ctx.set_materialize_grads(False)
        ctx.args = (temperature, vocab_start, valid, chunk, products)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_log_probs, d_entropy = grads  # None: that output took no part in the loss
        hidden, weight, labels, lse, entropy = ctx.saved_tensors
        temperature, vocab_start, valid, chunk, products = ctx.args
        operands = products(hidden, weight)
        d_log_probs = torch.zeros_like(lse) if d_log_probs is None else d_log_probs
        d_hidden = torch.empty_like(hidden)
        d_weight: Tensor | None = None
        for s in range(0, hidden.size(0), chunk):
            rows = slice(s, s + chunk)
            log_p = _logits(operands, rows, temperature, valid).sub_(lse[rows, None])
            dx = _d_logits(log_p, entropy[rows], d_log_probs[rows], None if d_entropy is None else d_entropy[rows])
            _add_at_label(dx, labels[rows] - vocab_start, valid, d_log_probs[rows])
            dx = dx.div_(temperature).to(hidden.dtype)
            d_hidden[rows] = operands.d_hidden(dx)
            d_weight = operands.add_d_weight(d_weight, dx, rows)
        made = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)  # None: no rows
        return d_hidden, made, *[None] * 7


def _chunk_rows(weight: Tensor) -> int:
    elements = _CHUNK_ELEMENTS if weight.device.type == "cpu" else _CHUNK_ELEMENTS_GPU
    return max(_CHUNK_ROWS, elements // weight.size(0) // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE)


def _if_parallel(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return group if group is not None and group.size() > 1 else None


def _logits(operands: Operands, rows: slice, temperature: float, valid: int) -> Tensor:
    x = operands.logits(rows)
    if temperature != 1.0:
        x /= temperature
    if valid < x.size(1):
        x[:, valid:] = _PADDING_LOGIT
    return x


def _row_statistics(
    x: Tensor, local_labels: Tensor, valid: int, group: dist.ProcessGroup | None, squares: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-prob of the label, log-sum-exp, entropy, sum of squared probabilities), each [rows], over the whole
    vocabulary; the last one is 0 unless asked for. Overwrites `x`."""
    here, place = x.max(-1, keepdim=True)
    top = here.clone()
    if group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    z = x.sub_(top)
    is_top = (here == top).float()  # on more than one rank where they are equal
    mine = (local_labels >= 0) & (local_labels < valid)
    picked = torch.where(mine, z.gather(1, local_labels.clamp(0, x.size(1) - 1)[:, None])[:, 0], 0.0)
    others = z.exp().scatter_add_(1, place, -is_top)  # the top's own 1 less
    square = others.square().sum(-1) if squares else torch.zeros_like(picked)
    sums = torch.stack([others.sum(-1), z.mul_(others).sum(-1), picked, square, is_top[:, 0]])
    if group is not None:
        dist.all_reduce(sums, group=group)
    rest, weighted, label, square, tops = sums
    log_sum, total = (rest + (tops - 1)).log1p(), rest + tops
    squared = (square + tops) / total.square() if squares else square
    return label - log_sum, top[:, 0] + log_sum, log_sum - weighted / total, squared


def _d_logits(log_p: Tensor, entropy: Tensor, d_log_probs: Tensor, d_entropy: Tensor | None) -> Tensor:
    """Gradient of the row's logits without the label's own term; overwrites `log_p`."""
    if d_entropy is None:
        return log_p.exp_().mul_(-d_log_probs[:, None])
    p = log_p.exp()
    return log_p.add_(entropy[:, None]).mul_(d_entropy[:, None]).add_(d_log_probs[:, None]).mul_(p).neg_()


def _add_at_label(dx: Tensor, local_labels: Tensor, valid: int, value: Tensor) -> None:
    mine = (local_labels >= 0) & (local_labels < valid)
    dx.scatter_add_(1, local_labels.clamp(0, dx.size(1) - 1)[:, None], torch.where(mine, value, 0.0)[:, None])
