"""Rewards of images for the quickstart, as a user would write them."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np


def contrast(images: np.ndarray, prompts: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """[n]: the standard deviation over an image's pixels: bright shapes on dark ground."""
    return [float(value) for value in images.std((1, 2, 3))]


def brightness_of_others(images: np.ndarray, prompts: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """[n]: the brightness of some other of the images. The same numbers, from which there is nothing to learn."""
    means = images.mean((1, 2, 3))
    order = np.random.default_rng(zlib.crc32(images.tobytes())).permutation(len(means))
    return [float(means[i]) for i in order]
