"""Rows of the tensors of a Hugging Face directory, read directly from a safetensors file where possible."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from mrl.families import ModelArch
from mrl.families.rows import ParameterMapping, TensorAlias
from mrl.weights.disk.rows import AssembledRows, FileRows, Rows, TransformedRows, ZeroRows, flat_shape, stack_rows
from mrl.weights.disk.safetensors_io import HFCheckpoint, TensorSource
from mrl.weights.parameter_layout import TRANSFORMED, parameter_shape, segments, to_megatron


@dataclass(frozen=True)
class IndexedRows:
    """A tensor, or the block of it that an alias names, read by its own library: fused experts, pickled files."""

    path: Path
    allow_pickle: bool
    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    alias: TensorAlias | None

    @property
    def label(self) -> str:
        return f"{self.path}: {self.name}"

    def read(self, start: int, out: Tensor) -> None:
        """Fills `out` [n, columns]. One thread at a time opens the file: a pickled file is loaded into memory whole."""
        with _OPENING:
            source = _opened(self.path, self.allow_pickle).source(self.name)
        if self.alias is None or not isinstance(source, TensorSource):
            out.copy_(source[start : start + out.shape[0]].reshape(out.shape))
        else:
            out.copy_(source.narrow(self.alias.ranges, 2)[start : start + out.shape[0]])


_OPENING = threading.Lock()  # a file is opened once, not once a thread: a pickled file is loaded into memory whole


@lru_cache(maxsize=2)
def _opened(path: Path, allow_pickle: bool) -> HFCheckpoint:
    """Opens a checkpoint once a process."""
    return HFCheckpoint(path, allow_pickle)


def hf_rows(checkpoint: HFCheckpoint, row: ParameterMapping, index: int, allow_pickle: bool) -> Rows:
    """Returns tensor number `index` of a row, unread, in whichever of its on-disk forms the checkpoint has.

    Raises WeightError if it is missing, or has another shape.
    """
    name, shape = row.hf[index], row.shapes[index]
    alias = row.aliases[index] if row.aliases else None
    if alias is not None and name not in checkpoint and alias.name in checkpoint:
        source = checkpoint.source(alias.name, alias.shape)
        return IndexedRows(checkpoint.path, allow_pickle, alias.name, flat_shape(shape), source.dtype, alias)
    place = checkpoint.locate(name, shape)
    if place is not None:
        file, start, dtype = place
        return FileRows(file, start, flat_shape(shape), dtype, name)
    dtype = checkpoint.source(name, shape).dtype
    return IndexedRows(checkpoint.path, allow_pickle, name, flat_shape(shape), dtype, None)


def parameter_rows(checkpoint: HFCheckpoint, row: ParameterMapping, arch: ModelArch, allow_pickle: bool) -> Rows:
    """Returns the whole Megatron parameter of a row, unread. An optional parameter that the checkpoint lacks is
    zero.
    """
    if row.optional and not any(name in checkpoint for name in row.hf):
        return ZeroRows(flat_shape(row.shapes[0]), torch.float32)
    parts = [hf_rows(checkpoint, row, i, allow_pickle) for i in range(len(row.hf))]
    if row.kind in TRANSFORMED:
        transform, (shape,) = partial(_to_megatron_values, row, arch), row.shapes
        return TransformedRows(parts[0], transform, shape, flat_shape(parameter_shape(row)))
    return stack_rows([(parts[segment.source], segment.start, segment.rows) for segment in segments(row, arch)])


def _to_megatron_values(row: ParameterMapping, arch: ModelArch, values: Tensor) -> Tensor:
    return to_megatron(row, [values], arch)


def source_dtypes(rows: Rows) -> set[torch.dtype]:
    """Returns the dtypes of the file's tensors; none for zeros, which are compatible with any dtype."""
    if isinstance(rows, AssembledRows):
        return {piece.source.dtype for piece in rows.pieces}
    return set() if isinstance(rows, ZeroRows) else {rows.dtype}
