"""Mixture of sources: a fixed pattern that names the source of each prompt, repeated for ever.

Everything is a function of the prompt's place in the run, so there is no state to save, and the order does not depend
on the number of prompts a step takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESOLUTION = 10_000  # places of a pattern made from weights: shares are kept to 1/10000


class Mixture:
    """Mixture of sources with `sizes` rows. Without weights the pattern is one epoch over all rows. With weights each
    source has its share of the places, and its rows repeat as often as needed. A source's places are spread evenly.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None = None) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self._places = self.sizes  # of each source in the pattern
        if weights is not None:
            shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
            self._places = np.rint(shares * RESOLUTION).astype(np.int64).clip(1)
        source = np.repeat(np.arange(len(self.sizes)), self._places)
        number = np.concatenate([np.arange(places) for places in self._places])
        order = np.argsort((number + 0.5) / self._places[source], kind="stable")
        self._source, self._number = source[order], number[order]

    @property
    def shares(self) -> np.ndarray:
        """Share of each source among all prompts, [S]."""
        return self._places / self._places.sum()

    def rows_at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (source, epoch of that source, place in that epoch), [n] each, for the run's places, int64 [n]."""
        block, at = np.divmod(places, len(self._source))
        source = self._source[at]
        draw = block * self._places[source] + self._number[at]
        return source, *np.divmod(draw, self.sizes[source])
