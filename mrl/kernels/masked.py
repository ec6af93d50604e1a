"""Masking of [B, T] tensors a few rows at a time, so that successive operations find them in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_ELEMENTS = 1 << 17  # of a group of rows, on a CPU: few operations, and a MiB each stays in the shared cache
_WORDS = 1024  # bytes that `count` adds up in one word: fewer than 8 * 256
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def row_groups(x: Tensor) -> Iterator[slice]:
    """Returns slices of the rows of x [B, T]; all rows at once on a GPU, where each operation is a launch."""
    rows = max(1, _ELEMENTS // max(1, x.size(1)) if x.device.type == "cpu" else x.size(0))
    return (slice(start, start + rows) for start in range(0, x.size(0), rows))


def bits(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the mask for `keep`: integers as wide as the dtype, all ones where the bool mask [B, T] is True, else
    zeros.
    """
    return mask.view(torch.int8).neg().to(_INTEGERS[dtype.itemsize])


def has_holes(mask: Tensor) -> bool:
    """Returns True if a row of the bool mask [B, T] has a True after a False."""
    if mask.size(1) < 2:
        return False
    signs = mask.view(torch.int8)
    return any(bool((signs[rows, 1:] > signs[rows, :-1]).view(torch.int8).amax()) for rows in row_groups(mask))


def count(mask: Tensor) -> Tensor:
    """Returns the number of True values, 0-d int64, adding eight bytes at a time in words whose bytes cannot
    overflow.
    """
    if mask.numel() % _WORDS or mask.storage_offset() % 8 or not mask.is_contiguous():
        return mask.count_nonzero()
    return mask.view(-1).view(torch.int64).view(-1, _WORDS // 8).sum(1).view(torch.uint8).sum()


def keep(x: Tensor, ones: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns x where `ones` is set, 0 elsewhere, whatever the value of x there (even NaN); shape of `ones`.

    Writes to `out`, which may be x, or a new tensor. With `out`, x may be a column [rows, 1].
    """
    out = torch.empty_like(x) if out is None else out
    torch.bitwise_and(x.view(ones.dtype), ones, out=out.view(ones.dtype))
    return out
