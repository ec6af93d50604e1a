"""Randomness of a training pass: NEFTune's noise on the embeddings (arXiv 2310.05914), and dropout.

Both are functions of seed, sample, position and dimension alone: the same under every layout and micro-batch split, and
when a layer is recomputed.

The noise is uniform in [-1, 1) times alpha / sqrt(L h), L the sequence's own tokens. transformers uses L of the padded
or packed row, so that a sequence's noise shrinks with the tokens beside it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mrl import platform
from mrl.models.batch import ModelBatch

_STEP = -0x61C8864680B583EB  # the golden ratio's 64 bits, as Steele, Lea & Flood's SplitMix64 (2014) counts
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # and mixes
_BITS = 24  # of a float32
_ELEMENTS = 1 << 22  # of noise at once


def embedding_noise(batch: ModelBatch, like: Tensor, part: tuple[int, int]) -> Tensor:
    """Returns the noise [t, 1, h], or a rank's part of it, with dtype and device of `like`; no gradient.

    part: (index, count) of the equal parts of the tokens
    """
    h = like.size(-1)
    local = batch.starts.diff() // batch.cp[0]
    scale = batch.extras.noise / (batch.seq_lens.clamp(min=1) * h).double().sqrt().float()
    places = _places(batch, part)
    lengths, scales = batch.seq_lens.repeat_interleave(local), scale.repeat_interleave(local)
    lengths, scales = platform.to_device([lengths[places], scales[places]], like.device)
    keys, positions = _keys(batch, part, like.device), batch.positions[places]
    scales = torch.where(positions < lengths, scales, 0.0)
    made = torch.empty(positions.numel(), h, dtype=like.dtype, device=like.device)
    rows = max(1, _ELEMENTS // h)
    for first in range(0, positions.numel(), rows):
        some = slice(first, first + rows)
        made[some] = (_uniform(keys[some], h) * scales[some, None]).to(like.dtype)
    return made[:, None]


def dropout(x: Tensor, batch: ModelBatch, share: float, stream: int, part: tuple[int, int], first: int) -> Tensor:
    """Applies dropout of rate `share` to x [t, 1, d], with the usual rescaling.

    stream: distinct for every dropout; part: (index, count) of x's part of the tokens; first: x's first dimension among
    all
    """
    keys = _mixed(_keys(batch, part, x.device) ^ _signed(stream))
    kept = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    rows = max(1, _ELEMENTS // x.size(-1))
    for start in range(0, x.size(0), rows):
        some = slice(start, start + rows)
        kept[some, 0] = _uniform(keys[some], x.size(-1), first) >= 2 * share - 1
    return x * kept / (1 - share)


def _places(batch: ModelBatch, part: tuple[int, int]) -> slice:
    """Slice of a part's tokens among all of this rank."""
    count = batch.positions.numel()
    return slice(part[0] * count // part[1], (part[0] + 1) * count // part[1])


def _keys(batch: ModelBatch, part: tuple[int, int], device: torch.device) -> Tensor:
    """Key of each token of the part, [t] int64."""
    samples = batch.samples.repeat_interleave(batch.starts.diff() // batch.cp[0])[_places(batch, part)]
    (samples,) = platform.to_device([samples], device)
    return _mixed(_mixed(samples + _signed(batch.extras.seed)) + batch.positions[_places(batch, part)])


def _uniform(keys: Tensor, count: int, first: int = 0) -> Tensor:
    """Uniform float32 [n, count] in [-1, 1) from keys [n] int64, for dimensions from `first` on."""
    counter = torch.arange(first + 1, first + count + 1, device=keys.device) * _STEP
    bits = _shifted(_mixed(keys[:, None] + counter), 64 - _BITS)
    return bits.float() * math.ldexp(1.0, 1 - _BITS) - 1


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser; products wrap around."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift, which >> is not for signed numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(seed: int) -> int:
    """The last 63 bits of the seed."""
    return seed & ((1 << 63) - 1)
