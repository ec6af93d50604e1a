"""Gated delta rule and causal convolution over packed sequences, in plain torch.

Each sequence is cut into chunks, the last one padded. What happens inside of a chunk is computed for
all chunks at once. The state then passes from chunk to chunk, for all sequences at the same time: a step takes one
chunk of every sequence that is long enough. No value of a sequence enters a product with another sequence's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  # of the length of queries and keys, as in flash-linear-attention


@dataclass(frozen=True)
class Chunks:
    """Packed tokens [t] in chunks of `size` tokens, those of the first step in front, and in each step the longest
    sequences'.

    slot [t]: each token's place among the size * sum(steps) places of the chunks
    steps: number of sequences with so many chunks; offset [t]: tokens of the sequence before each token
    """

    size: int
    slot: Tensor
    steps: tuple[int, ...]
    offset: Tensor

    @staticmethod
    def make(starts: Tensor, size: int, device: torch.device) -> Chunks:
        """Builds the chunks; starts [S + 1]: of the sequences, on the CPU. Empty sequences have no chunks."""
        lengths = starts.to("cpu", torch.int64).diff()
        counts = (lengths + size - 1) // size
        rank = torch.empty_like(counts)
        rank[counts.argsort(descending=True, stable=True)] = torch.arange(len(counts))
        steps = [int((counts > step).sum()) for step in range(int(counts.max()))]
        first = F.pad(torch.tensor(steps).cumsum(0), (1, 0))
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
        offset = torch.arange(len(sequence)) - (lengths.cumsum(0) - lengths)[sequence]
        slot = (first[offset // size] + rank[sequence]) * size + offset % size
        return Chunks(size, slot.to(device), tuple(steps), offset.to(device))


def causal_conv(x: Tensor, weight: Tensor, chunks: Chunks) -> Tensor:
    """Returns the convolution of each channel with its weights, in each sequence: x [t, c], weight [c, 1, k] -> [t, c].

    The last weight is the token's own; before a sequence all is zero.
    """
    kernel = weight.size(-1)
    out = x * weight[:, 0, -1]
    for back in range(1, min(kernel, len(x))):
        before = F.pad(x[:-back], (0, 0, back, 0)).masked_fill(chunks.offset[:, None] < back, 0)
        out = out + before * weight[:, 0, -1 - back]
    return out


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """Returns what the queries read of the state, [t, heads, v] in the dtype of value (arXiv 2412.06464).

    query, key [t, key heads, k]; value [t, heads, v]; decay [t, heads], logarithms, at most 0; beta [t, heads]: how
    much of a value is written. Queries and keys get length 1. The state is zero at the start of each sequence:
    state_t = exp(decay_t) (state_(t-1) - beta_t k_t k_t^T state_(t-1)) + beta_t k_t v_t^T. Computed in float32, or in
    float64 if the value is.
    """
    wide = torch.promote_types(value.dtype, torch.float32)
    shared = value.size(1) // key.size(1)
    query, key = (_unit(x.to(wide)).repeat_interleave(shared, 1) for x in (query, key))
    query = query * query.size(-1) ** -0.5
    q, k, v, b, g = (_in_chunks(x.to(wide), chunks) for x in (query, key, value, beta[..., None], decay[..., None]))
    total = g.cumsum(2)  # [chunks, heads, size, 1]
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=q.device).triu(1)
    between = (total - total.mT).masked_fill(later, -torch.inf).exp()
    written = b * k
    # the corrections inside a chunk: a triangular system for all of its tokens
    right = torch.cat([b * v, written * total.exp()], -1)
    system = (written @ k.mT) * between
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, read = solved.split([v.size(-1), k.size(-1)], -1)
    inside = (q @ k.mT) * between
    last = total[:, :, -1:]
    q, k = q * total.exp(), k * (last - total).exp()
    state = q.new_zeros(chunks.steps[0], q.size(1), q.size(-1), v.size(-1))
    outputs = []
    sizes = chunks.steps
    parts = zip(sizes, *(x.split(sizes) for x in (q, k, values, read, inside, last.exp())), strict=True)
    for size, q_step, k_step, v_step, read_step, inside_step, kept in parts:
        state = state[:size]
        new = v_step - read_step @ state
        outputs.append(q_step @ state + inside_step @ new)
        state = state * kept + k_step.mT @ new
    found = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    return found.index_select(0, chunks.slot).to(value.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def _in_chunks(x: Tensor, chunks: Chunks) -> Tensor:
    """x [t, heads, n] -> [chunks, heads, size, n], with zeros behind the sequences."""
    places = x.new_zeros(sum(chunks.steps) * chunks.size, *x.shape[1:]).index_copy(0, chunks.slot, x)
    return places.unflatten(0, (-1, chunks.size)).transpose(1, 2)
