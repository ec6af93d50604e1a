"""Bounds of normal float32 numbers, in which optimizers, losses and rotary embeddings compute: below TINY is 0."""

from __future__ import annotations

TINY, MAX = 2.0**-126, 3.4028234e38
