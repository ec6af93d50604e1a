"""Image rewards for the quickstart, as a user would write them."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np


def contrast(images: np.ndarray, prompts: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Returns the standard deviation over an image's pixels, [n]: high for bright shapes on dark ground."""
    return [float(value) for value in images.std((1, 2, 3))]


def brightness_of_others(images: np.ndarray, prompts: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Returns the brightness of the images in random order, [n]: rewards without a signal."""
    means = images.mean((1, 2, 3))
    order = np.random.default_rng(zlib.crc32(images.tobytes())).permutation(len(means))
    return [float(means[i]) for i in order]
