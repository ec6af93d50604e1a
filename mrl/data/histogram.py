"""Histograms of lengths, and shortened texts, for people."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

BARS, BAR_WIDTH = 10, 40
SHOWN_CHARS = 2000


def histogram(lengths: np.ndarray, what: str) -> Iterator[str]:
    """Yields at most ten bars of equal width over the lengths int [n], in tokens, each with its number of rows."""
    low, high = int(lengths.min()), int(lengths.max())
    width = math.ceil((high - low + 1) / BARS)
    counts = np.bincount((lengths - low) // width)
    yield f"  tokens of {what}: {low} to {high}, mean {lengths.mean():.1f}"
    digits = len(str(low + width * len(counts)))
    for i, count in enumerate(counts.tolist()):
        first = low + i * width
        bar = "#" * math.ceil(BAR_WIDTH * count / int(counts.max()))
        yield f"  {first:{digits}} - {first + width - 1:{digits}} {bar:{BAR_WIDTH}} {count}"


def shortened_text(text: str) -> str:
    """Returns the beginning of the text, and the number of characters left out."""
    more = len(text) - SHOWN_CHARS
    return f"{text[:SHOWN_CHARS]} ... and {more} characters more" if more > 0 else text
