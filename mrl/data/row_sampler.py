"""Order of rows: the rows of a step are a function of (seed, step) alone, so there is no state to save."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mrl.config.schema import SourceConfig
from mrl.data.mixture import Mixture


class RowSampler:
    """Endless sequence of places over the usable rows of all sources, with `sizes` rows each. Each source goes through
    epochs, each a permutation of its rows. Without weights an epoch of all sources has each row once.
    """

    def __init__(self, sources: Sequence[SourceConfig], sizes: Sequence[int], shuffle: bool) -> None:
        weights = [source.weight for source in sources if source.weight is not None]
        self.mixture, self._sizes, self._shuffle = Mixture(sizes, weights or None), sizes, shuffle

    def of_step(self, step: int, n: int, seed: int) -> list[tuple[int, int]]:
        """Returns (source, place among its usable rows) of the n rows of step `step` (from 0): places step*n ... of the
        endless sequence. Raises ValueError for a negative step.
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        return self._at(range(step * n, (step + 1) * n), seed if self._shuffle else None)

    def first(self, n: int) -> list[tuple[int, int]]:
        """Returns (source, place) of the first n rows (all if there are fewer) in their own order, round-robin over
        several sources.
        """
        return self._at(range(min(n, sum(self._sizes))), None)

    def _at(self, places: range, seed: int | None) -> list[tuple[int, int]]:
        source, epoch, at = self.mixture.rows_at(np.arange(places.start, places.stop))
        order = {key: self._order(*key, seed) for key in set(zip(source.tolist(), epoch.tolist(), strict=True))}
        return [(int(s), int(order[s, e][a])) for s, e, a in zip(source, epoch, at, strict=True)]

    def _order(self, source: int, epoch: int, seed: int | None) -> np.ndarray:
        size = self._sizes[source]
        return np.arange(size) if seed is None else np.random.default_rng([seed, epoch, source]).permutation(size)
