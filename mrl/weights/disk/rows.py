"""Matrices in files, read by rows into memory that the caller owns. Nothing is memory-mapped or cached.

A vector is a matrix of one column. Every conversion of a parameter moves whole rows (`kinds.segments`), so a conversion
is a list of rows that are read from one place and written to another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mrl.weights.errors import WeightError

CAST_BYTES = 1 << 20  # size of a read that is cast: it stays in the processor's cache


class Rows(Protocol):
    """Matrix on disk, [rows, columns]. Several threads may read at once."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def label(self) -> str:
        """File and tensor, for error messages."""

    def read(self, start: int, out: Tensor) -> None:
        """Fills the contiguous `out` [n, columns], of any dtype, with the rows from `start`."""


@dataclass(frozen=True)
class FileRows:
    """Contiguous rows of a file, from byte `offset`."""

    file: Path
    offset: int
    shape: tuple[int, int]
    dtype: torch.dtype
    name: str = ""

    @property
    def label(self) -> str:
        return f"{self.file}: {self.name}"

    def read(self, start: int, out: Tensor) -> None:
        """Fills `out` [n, columns]; casts piece by piece if the dtypes differ."""
        row_bytes = self.shape[1] * self.dtype.itemsize
        if out.dtype == self.dtype:
            read_at(self.file, self.offset + start * row_bytes, out)
            return
        for first, rows in row_blocks((out.shape[0], self.shape[1]), self.dtype.itemsize, CAST_BYTES):
            raw = torch.empty(rows, self.shape[1], dtype=self.dtype)
            read_at(self.file, self.offset + (start + first) * row_bytes, raw)
            out[first : first + rows] = raw


@dataclass(frozen=True)
class ZeroRows:
    shape: tuple[int, int]
    dtype: torch.dtype
    label: str = "zeros"

    def read(self, start: int, out: Tensor) -> None:
        """Fills `out` [n, columns]."""
        out.zero_()


@dataclass(frozen=True)
class MatrixPiece:
    """Piece of an assembled matrix: rows `row` .. `row + rows` of `source`, all its columns, at (`at_row`,
    `at_col`)."""

    at_row: int
    rows: int
    source: Rows
    row: int = 0
    at_col: int = 0


@dataclass(frozen=True)
class AssembledRows:
    """Matrix assembled from other matrices, which cover it exactly."""

    pieces: tuple[MatrixPiece, ...]
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def label(self) -> str:
        return self.pieces[0].source.label

    def read(self, start: int, out: Tensor) -> None:
        """Fills `out` [n, columns] from the pieces in that range."""
        stop = start + out.shape[0]
        for piece in self.pieces:
            first, last = max(start, piece.at_row), min(stop, piece.at_row + piece.rows)
            if first >= last:
                continue
            target = out[first - start : last - start, piece.at_col : piece.at_col + piece.source.shape[1]]
            part = target if target.is_contiguous() else torch.empty(target.shape, dtype=out.dtype)
            piece.source.read(piece.row + first - piece.at_row, part)
            if part is not target:
                target.copy_(part)


def covers(pieces: Sequence[MatrixPiece], shape: tuple[int, int]) -> bool:
    """Returns True if each place of a matrix of `shape` is in exactly one piece, and no piece extends beyond the
    matrix.
    """
    boxes = [(p.at_row, p.at_row + p.rows, p.at_col, p.at_col + p.source.shape[1]) for p in pieces]
    cuts = [sorted({0, shape[side], *(at for box in boxes for at in box[2 * side : 2 * side + 2])}) for side in (0, 1)]
    rows, columns = ({at: index for index, at in enumerate(along)} for along in cuts)
    times = torch.zeros(len(rows), len(columns), dtype=torch.int32)  # between each cut and the next
    for top, bottom, left, right in boxes:
        times[rows[top] : rows[bottom], columns[left] : columns[right]] += 1
    inside = all(along[0] == 0 and along[-1] == size for along, size in zip(cuts, shape, strict=True))
    return inside and bool((times[:-1, :-1] == 1).all())


def stack_rows(parts: Sequence[tuple[Rows, int, int]]) -> AssembledRows:
    """Stacks (source, first row, rows) vertically."""
    pieces, at = [], 0
    for source, row, rows in parts:
        pieces.append(MatrixPiece(at, rows, source, row))
        at += rows
    first = parts[0][0]
    return AssembledRows(tuple(pieces), (at, first.shape[1]), first.dtype)


@dataclass(frozen=True)
class TransformedRows:
    """Rows [n, columns] of the transformation `transform` of a tensor. They are not rows of the tensor itself, so every
    read
    of a block reads the whole tensor: `whole` should fit into one block. whole_shape: shape of that tensor, one or
    two dimensions.
    """

    whole: Rows
    transform: Callable[[Tensor], Tensor]
    whole_shape: tuple[int, ...]
    shape: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def label(self) -> str:
        return self.whole.label

    def read(self, start: int, out: Tensor) -> None:
        """Fills `out` [n, columns]."""
        values = torch.empty(self.whole.shape, dtype=self.dtype)
        self.whole.read(0, values)
        transformed = self.transform(values.view(self.whole_shape)).reshape(self.shape)
        out.copy_(transformed[start : start + out.shape[0]])


@dataclass(frozen=True)
class SlicesRows:
    """Tensor stored slice by slice along its first dimension: each row [columns] is one whole slice."""

    slices: tuple[Rows, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.slices), torch.Size(self.slices[0].shape).numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.slices[0].dtype

    @property
    def label(self) -> str:
        return self.slices[0].label

    def read(self, start: int, out: Tensor) -> None:
        """Fills `out` [n, columns]."""
        for index, row in enumerate(out, start):
            self.slices[index].read(0, row.view(self.slices[index].shape))


@dataclass(frozen=True)
class RowsTensor:
    """Rows that are indexed by slices like a tensor of `shape`."""

    rows: Rows
    shape: tuple[int, ...]

    @property
    def label(self) -> str:
        return self.rows.label

    def __getitem__(self, index: Any) -> Tensor:
        asked = index if isinstance(index, tuple) else (index,)
        start, stop, _ = asked[0].indices(self.shape[0])
        out = torch.empty(max(0, stop - start), self.rows.shape[1], dtype=self.rows.dtype)
        self.rows.read(start, out)
        return out.view(-1, *self.shape[1:])[(slice(None), *asked[1:])]


def all_finite(values: Tensor) -> bool:
    """Returns True if a tensor of any shape has neither NaN nor infinity. One pass at memory speed, without a second
    tensor.
    """
    return all(bool(extreme.isfinite()) for extreme in values.aminmax())


def require_finite(rows: Rows, start: int, values: Tensor) -> None:
    """Raises WeightError, which names file and tensor, if `values` [n, columns], read from `start`, hold NaN or
    infinity.
    """
    if all_finite(values):
        return
    stop = start + values.shape[0]
    for piece in rows.pieces if isinstance(rows, AssembledRows) else (MatrixPiece(0, rows.shape[0], rows),):
        first, last = max(start, piece.at_row), min(stop, piece.at_row + piece.rows)
        if first < last:
            part = torch.empty(last - first, piece.source.shape[1], dtype=piece.source.dtype)
            piece.source.read(piece.row + first - piece.at_row, part)
            if not all_finite(part):
                raise WeightError(f"{piece.source.label} contains NaN or infinity")
    raise WeightError(f"{rows.label} has values beyond the range of {values.dtype}: they would become infinite")


def flat_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Maps [n] to (n, 1), [n, m] to (n, m); with more dimensions, the first alone counts rows."""
    return shape[0], torch.Size(shape[1:]).numel()


def read_at(file: Path, offset: int, out: Tensor) -> None:
    """Fills `out`, contiguous and of any shape, with the file's bytes from `offset`. Raises WeightError if the file
    ends early.
    """
    done, view = 0, tensor_memory(out)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if count == 0:
                raise WeightError(f"{file} ends at byte {offset + done}: it is truncated")
            done += count
    finally:
        os.close(descriptor)


def tensor_memory(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor of any shape, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def row_blocks(shape: tuple[int, int], itemsize: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields (first row, rows) of blocks of at most `max_bytes`, but at least one row."""
    step = max(1, max_bytes // max(1, shape[1] * itemsize))
    for start in range(0, shape[0], step):
        yield start, min(step, shape[0] - start)
