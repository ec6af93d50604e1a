"""Rows in packs of a bounded number of tokens, by best-fit decreasing (TRL's `bfd` and `bfd_split`): a step trains on
whole packs, and so on about the same number of tokens as every other step. Rows of a pack do not attend to each
other.

Packs are a function of (seed, epoch), so that there is no state to save.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from mrl.config.schema import PackingConfig
from mrl.core import Rollout
from mrl.data.sft import SFTDataset
from mrl.data.sft_source import SFTExample


class PackedRows:
    """Packs of a data set's rows. Rows longer than a pack are split into pieces."""

    def __init__(self, data: SFTDataset, cfg: PackingConfig, seed: int) -> None:
        self._data, self._seed = data, seed
        self._size = cfg.seq_length
        self._pieces = [list(pieces_of(row, cfg.seq_length)) for row in data.rows]
        self._epoch = lru_cache(maxsize=2)(self._make)
        self._before = [0]  # packs of the epochs before each

    def __len__(self) -> int:
        """Returns the number of packs of the first epoch; other epochs may have a few more or less."""
        return len(self._epoch(0))

    def rows(self) -> list[SFTExample]:
        """Returns the contents of all packs: rows, and with bfd_split the pieces of long rows."""
        return [piece for pieces in self._pieces for piece in pieces]

    def notes(self) -> Iterator[str]:
        """Yields a sentence on each property of the training packs."""
        filled = sum(len(row.ids) for pack in self._epoch(0) for row in pack) / (len(self) * self._size)
        yield f"data.train: its rows fill {len(self)} packs of {self._size} tokens per epoch to {filled:.1%}"
        split = sum(len(row.ids) > self._size for row in self._data.rows)
        without = [piece for piece in self.rows() if piece.starts_mid_row]
        if split:
            yield f"data.train: {split} rows are longer than packing.seq_length={self._size} and split into pieces"
        if without and self._data.cfg.form != "text":
            tokens = sum(piece.num_trained_tokens for piece in without)
            yield (
                f"data.train: {len(without)} of these pieces, with {tokens} trained tokens, lack the beginning of "
                "their row, and with it the question (packing.strategy: bfd truncates long rows instead)"
            )

    def batch(self, step: int, n: int) -> Rollout:
        """Returns the rows of the n packs of step `step`, from 0."""
        packs = [self.pack(number) for number in range(step * n, (step + 1) * n)]
        return self._data.batch_of(step, [row for pack in packs for row in pack])

    def pack(self, number: int) -> list[SFTExample]:
        """Returns the rows of pack `number` of the run, from 0."""
        while self._before[-1] <= number:
            self._before.append(self._before[-1] + len(self._epoch(len(self._before) - 1)))
        at = int(np.searchsorted(self._before, number, side="right")) - 1
        return self._epoch(at)[number - self._before[at]]

    def _make(self, epoch: int) -> list[list[SFTExample]]:
        order = self._data.of_step(epoch, len(self._data), self._seed)
        rows = [piece for number in order for piece in self._pieces[number]]
        packs = [[rows[place] for place in pack] for pack in best_fit([len(row.ids) for row in rows], self._size)]
        if not self._data.cfg.shuffle:
            return packs
        return [packs[place] for place in np.random.default_rng([self._seed, epoch]).permutation(len(packs))]


def best_fit(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Returns indices of `sizes` in packs of at most `most`: each, largest first, in the pack with the least free space
    that it fits into. O(n log n).
    """
    packs: list[list[int]] = []
    by_room: dict[int, list[list[int]]] = {}
    rooms: list[int] = []  # with a pack, sorted
    for place in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[place]
        at = bisect_left(rooms, size)
        if at == len(rooms):
            room, pack = most, list[int]()
            packs.append(pack)
        else:
            room = rooms[at]
            pack = by_room[room].pop()
            if not by_room[room]:
                del rooms[at]
        pack.append(place)
        left = room - size
        if not by_room.setdefault(left, []):
            insort(rooms, left)
        by_room[left].append(pack)
    return packs


def pieces_of(row: SFTExample, most: int) -> Iterator[SFTExample]:
    """Yields the row in parts of at most `most` tokens, without parts that have no trained token. The first token of a
    part is not trained: nothing before it is seen.
    """
    for first in range(0, len(row.ids), most):
        ids = row.ids[first : first + most]
        prompt = min(max(row.prompt - first, 1), len(ids))
        learnt = first + prompt - row.prompt
        weights = None if row.weights is None else row.weights[learnt : first + len(ids) - row.prompt]
        if prompt < len(ids) and (weights is None or weights.any()):
            is_cut = row.is_cut or first + most < len(row.ids)
            yield SFTExample(row.index, ids, prompt, weights, row.source, is_cut, starts_mid_row=first > 0)
