"""The normal numbers of float32, in which optimizers, losses and rotary embeddings compute: below TINY counts as 0."""

from __future__ import annotations

TINY, MAX = 2.0**-126, 3.4028234e38
