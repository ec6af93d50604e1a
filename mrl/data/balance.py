"""Assignment of samples to micro-batches and data-parallel ranks, in integers: every rank computes the same."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from mrl.families.flops import ForwardFlops

Bins = list[list[int]]  # sample ids of each bin


def plan_micro_batches(
    seq_lens: Sequence[int] | Tensor,
    dp: int,
    max_tokens: int,
    align: int = 1,
    multiple_of: int = 1,
    costs: Sequence[int] | Tensor | None = None,
) -> list[list[list[int]]]:
    """Returns `plan[dp_rank][micro_batch]`: ascending sample ids, every sample exactly once.

    All ranks get the same number of micro-batches: a multiple of `multiple_of` (a virtual pipeline needs multiples of
    its stages), at least one, and as few as a best-fit packing finds. A micro-batch holds at most `max_tokens` tokens,
    each sequence counted with its padding to a multiple of `align`; a longer sequence gets a micro-batch of its own.
    Costs are balanced over all micro-batches and over the ranks (most expensive first, then repair by swaps);
    micro-batches with the same index have similar costs on all ranks. Micro-batches can be empty.

    Args:
        costs: cost of each sequence, integers of any unit; the token counts if None. If micro-batches of equal cost
            would exceed `max_tokens`, they get equal token counts, and only the ranks get equal cost.

    Raises:
        ValueError: for a number below 1, or if `costs` and `seq_lens` differ in length.
    """
    if min(dp, max_tokens, align, multiple_of) < 1:
        raise ValueError(
            f"dp={dp}, max_tokens={max_tokens}, align={align}, multiple_of={multiple_of}: all must be >= 1"
        )
    lens = np.asarray(seq_lens, dtype=np.int64)
    lens = (lens + align - 1) // align * align
    prices = lens if costs is None else np.asarray(costs, dtype=np.int64)
    if prices.shape != lens.shape:
        raise ValueError(f"{prices.size} costs for {lens.size} sequences")
    sizes: list[int] = lens.tolist()
    bins = _bins(sizes, prices.tolist(), dp * multiple_of, max_tokens)
    return _deal(bins, prices.tolist(), dp)


def costs_of(forward: ForwardFlops, seq_lens: Tensor, outputs: Tensor) -> Tensor:
    """Returns the cost of each sequence, [n] int64, in 64ths of a token's cost in the layers' matrices. The share of
    attention grows with the square of the length.

    Args:
        seq_lens: tokens of each sequence, [n] int64.
        outputs: number of these tokens whose log-prob or value is computed, [n] int64.
    """
    lens = seq_lens.double()
    whole = forward.per_token * lens + forward.per_pair * lens * (lens + 1) / 2 + forward.per_output * outputs
    return (whole * 64 / forward.per_token).ceil().long()


def _bins(sizes: list[int], costs: list[int], step: int, max_tokens: int) -> Bins:
    """Returns a multiple of `step` bins, as few as possible, each within `max_tokens`, as even as possible."""
    fewest = max(1, -(-sum(min(s, max_tokens) for s in sizes) // max_tokens))  # no packing can do with less
    count = -(-fewest // step) * step
    if (even := _even(sizes, costs, count, max_tokens)) is not None:
        return even
    order = _largest_first(sizes)
    tight = _best_fit(sizes, order, max_tokens)
    if len(tight) > count:
        count = -(-len(tight) // step) * step
        if (even := _even(sizes, costs, count, max_tokens)) is not None:
            return even
    low, high = max_tokens // 2, max_tokens  # MULTIFIT: the smallest capacity for which best fit needs <= count bins
    while high - low > max(1, max_tokens // 256):
        middle = (low + high) // 2
        bins = _best_fit(sizes, order, middle)
        if len(bins) <= count and _fits(bins, sizes, max_tokens):
            tight, high = bins, middle
        else:
            low = middle
    return tight + [[] for _ in range(count - len(tight))]


def _even(sizes: list[int], costs: list[int], count: int, max_tokens: int) -> Bins | None:
    """Returns `count` bins of equal cost, or else of equal token counts; None if neither fits `max_tokens`."""
    for weights in (costs,) if costs == sizes else (costs, sizes):
        bins = balance(weights, _largest_first(weights), count)
        if _fits(bins, sizes, max_tokens):
            return bins
    return None


def _largest_first(sizes: list[int]) -> list[int]:
    order: list[int] = np.argsort(-np.asarray(sizes, dtype=np.int64), kind="stable").tolist()
    return order


def _fits(bins: Bins, sizes: list[int], max_tokens: int) -> bool:
    return all(len(b) < 2 or sum(sizes[i] for i in b) <= max_tokens for b in bins)


def _best_fit(sizes: list[int], order: list[int], capacity: int) -> Bins:
    """Best-fit decreasing: puts each item into the fullest bin that it fits into, else into a new bin."""
    bins: Bins = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for i in order:
        size = sizes[i]
        at = bisect_left(room, (size, -1))
        if at == len(room):
            bins.append([i])
            insort(room, (capacity - size, len(bins) - 1))
        else:
            left, j = room.pop(at)
            bins[j].append(i)
            insort(room, (left - size, j))
    return bins


def balance(sizes: list[int], order: list[int], count: int) -> Bins:
    """Returns `count` bins of nearly equal sums: longest processing time first (Graham 1969), then swaps between the
    extremes.

    Args:
        order: indices into `sizes`, largest first.
    """
    heap = list(range(count))  # load * count + bin
    bins: Bins = [[] for _ in range(count)]
    replace, put = heapq.heapreplace, [items.append for items in bins]
    for i in order:
        lightest = heap[0]
        put[lightest % count](i)
        replace(heap, lightest + sizes[i] * count)
    loads = np.zeros(count, dtype=np.int64)
    for key in heap:
        loads[key % count] = key // count
    for _ in range(2 * count):
        high, low = int(loads.argmax()), int(loads.argmin())
        moved = _swap(bins[high], bins[low], sizes, int(loads[high] - loads[low]))
        if moved == 0:
            break
        loads[high] -= moved
        loads[low] += moved
    return bins


def _swap(high: list[int], low: list[int], sizes: list[int], gap: int) -> int:
    """Swaps or moves one item between the bins so that the gap shrinks most; returns the tokens moved, 0 if none."""
    if gap < 2:
        return 0
    mine = np.asarray([sizes[i] for i in high], dtype=np.int64)
    theirs = np.asarray([0] + [sizes[i] for i in reversed(low)], dtype=np.int64)  # ascending; 0: a move
    wanted = mine - gap // 2
    at = np.searchsorted(theirs, wanted).clip(0, len(theirs) - 1)
    moved = np.concatenate([mine - theirs[at], mine - theirs[(at - 1).clip(0)]])
    best = int(np.argmin(np.abs(2 * moved - gap)))
    tokens = int(moved[best])
    if not 0 < tokens < gap:
        return 0
    a, b = best % len(high), int((at if best < len(high) else (at - 1).clip(0))[best % len(high)])
    item = high.pop(a)
    if b:
        insort(high, low.pop(len(low) - b), key=lambda i: -sizes[i])
    insort(low, item, key=lambda i: -sizes[i])
    return tokens


def _deal(bins: Bins, sizes: list[int], dp: int) -> list[list[list[int]]]:
    """Deals bins to ranks, largest first: each round gives every rank one bin, the lightest rank the heaviest bin."""
    loads = [sum(sizes[i] for i in b) for b in bins]
    order = sorted(range(len(bins)), key=lambda j: (-loads[j], j))
    plan: list[list[list[int]]] = [[] for _ in range(dp)]
    totals = [0] * dp
    for first in range(0, len(order), dp):
        ranks = sorted(range(dp), key=lambda r: (totals[r], r))
        for rank, j in zip(ranks, order[first : first + dp], strict=True):
            plan[rank].append(sorted(bins[j]))
            totals[rank] += loads[j]
    return plan
