"""Texts joined and cut into rows of one length, for continued pre-training: TRL's ConstantLengthDataset as a function
of (seed, epoch), so that there is no state to save.

An epoch's texts fill buffers of at least seq_length * num_of_sequences tokens; the last buffer may be shorter. Each
buffer is cut every seq_length tokens, its rest is dropped, and its rows are shuffled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mrl.config.schema import PackingConfig
from mrl.core import Rollout
from mrl.data.errors import DataError
from mrl.data.sft import SFTDataset


@dataclass(frozen=True)
class _Epoch:
    """One epoch. texts [D]: text numbers in order; ends [D]: end of each text when all are joined; starts [n]: of the
    rows.
    """

    texts: np.ndarray
    ends: np.ndarray
    starts: np.ndarray


class WrappedRows:
    """Rows of a data set's joined texts. Raises DataError if the texts do not fill one row."""

    def __init__(self, data: SFTDataset, cfg: PackingConfig, seed: int) -> None:
        self._data, self._cfg, self._seed = data, cfg, seed
        self._lengths = np.array([len(row.ids) for row in data.rows], dtype=np.int64)
        self._tokens = np.concatenate([row.ids for row in data.rows])
        self._starts = self._lengths.cumsum() - self._lengths
        self._epoch = lru_cache(maxsize=2)(self._make)
        self._before = [0]  # rows of the epochs before each
        if not len(self._epoch(0).starts):
            has = f"{self._lengths.sum()} tokens, including EOS"
            raise DataError(f"data.train: {has}, do not fill one row of packing.seq_length={cfg.seq_length} tokens")

    def __len__(self) -> int:
        """Returns the number of rows of the first epoch; other epochs may have a few more or less."""
        return len(self._epoch(0).starts)

    def batch(self, step: int, n: int) -> Rollout:
        """Returns the n rows of step `step` (from 0): every token but the first is trained."""
        rows = [self.row(number) for number in range(step * n, (step + 1) * n)]
        return Rollout.of(step, [row[:1] for row in rows], [row[1:] for row in rows])

    def notes(self) -> Iterator[str]:
        """Yields a sentence on the training rows."""
        yield f"data.train: its texts fill {len(self)} rows of {self._cfg.seq_length} tokens per epoch"

    def require(self, rows: int) -> None:
        """Raises DataError if the texts are not repeated and have fewer than `rows` rows."""
        if not self._cfg.infinite and rows > len(self):
            raise DataError(
                f"data.train: {len(self)} rows of packing.seq_length={self._cfg.seq_length} tokens, and the run needs "
                f"{rows}: set packing.infinite: true, or lower run.steps"
            )

    def row(self, number: int) -> np.ndarray:
        """Returns row `number` of the run, from 0: [seq_length] int32."""
        while self._before[-1] <= number:
            self._before.append(self._before[-1] + len(self._epoch(len(self._before) - 1).starts))
        at = int(np.searchsorted(self._before, number, side="right")) - 1
        epoch = self._epoch(at)
        places = epoch.starts[number - self._before[at]] + np.arange(self._cfg.seq_length)
        texts = np.searchsorted(epoch.ends, places, side="right")
        numbers = epoch.texts[texts]
        return self._tokens[self._starts[numbers] + places - (epoch.ends[texts] - self._lengths[numbers])]

    def _make(self, epoch: int) -> _Epoch:
        cfg, texts = self._cfg, np.array(self._data.of_step(epoch, len(self._data), self._seed))
        ends = self._lengths[texts].cumsum()
        starts, first = [], 0
        for buffer in range(len(texts)):
            last = int(np.searchsorted(ends, first + cfg.seq_length * cfg.num_of_sequences))
            after = int(ends[min(last, len(ends) - 1)])
            rows = first + cfg.seq_length * np.arange((after - first) // cfg.seq_length)
            shuffles = self._data.cfg.shuffle
            starts.append(np.random.default_rng([self._seed, epoch, buffer]).permutation(rows) if shuffles else rows)
            first = after
            if last >= len(ends) - 1:
                break
        return _Epoch(texts, ends, np.concatenate(starts))
