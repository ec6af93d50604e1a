"""Layout of parameters in Megatron's data-parallel buffers, exact to the element."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import lcm

PARAM_ALIGN, BUCKET_ALIGN = 64, 128  # elements, of a parameter's start and a bucket's end: megatron-core 0.16


@dataclass(frozen=True)
class Buffer:
    """Megatron buffer: parameters in reverse order, cut into buckets that `size` data-parallel ranks share evenly.

    places: (start, end) of the parameters; buckets: of the buckets, padded
    """

    places: tuple[tuple[int, int], ...]
    buckets: tuple[tuple[int, int], ...]
    size: int

    @cached_property
    def weights(self) -> int:
        """Elements of the parameters."""
        return sum(end - start for start, end in self.places)

    @property
    def numel(self) -> int:
        return self.buckets[-1][1] if self.buckets else 0

    def shard(self, rank: int) -> int:
        """Returns the elements of parameters in the rank's part of every bucket."""
        found = 0
        for start, end in self.buckets:
            part = (end - start) // self.size
            found += self._before(start + (rank + 1) * part) - self._before(start + rank * part)
        return found

    def _before(self, position: int) -> int:
        """Elements of parameters below a position."""
        index = bisect_right(self._starts, position)
        return self._sums[index] - max(0, self.places[index - 1][1] - position) if index else 0

    @cached_property
    def _starts(self) -> list[int]:
        return [start for start, _ in self.places]

    @cached_property
    def _sums(self) -> list[int]:
        return [0, *accumulate(end - start for start, end in self.places)]


def plan_buffer(parameters: Sequence[tuple[int, bool]], size: int, most: int | None) -> Buffer:
    """Returns the buffer of parameters, given in model order as (elements, True if the bucket is its own).

    most: elements of a bucket, which ends after the parameter that reaches them; None: one bucket
    """
    unit = lcm(size, BUCKET_ALIGN)
    places: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    begin = end = 0
    for numel, apart in reversed(parameters):
        start = _up(end, PARAM_ALIGN)
        if apart and places and places[-1][0] >= begin:
            buckets.append((begin, _up(start, unit)))
            begin = start = buckets[-1][1]
        end = start + numel
        places.append((start, end))
        if apart or (most is not None and end - begin >= most):
            buckets.append((begin, _up(end, unit)))
            begin = end = buckets[-1][1]
    if places and places[-1][0] >= begin:
        buckets.append((begin, _up(end, unit)))
    return Buffer(tuple(places), tuple(buckets), size)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
