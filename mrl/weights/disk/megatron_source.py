"""Megatron checkpoint that reads like a Hugging Face one: the same names and slices, independent of the on-disk
layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from mrl.families import ModelArch
from mrl.families.rows import ParameterMapping
from mrl.families.stacks import slice_of
from mrl.families.table import weight_table
from mrl.weights.disk.rows import (
    AssembledRows,
    MatrixPiece,
    Rows,
    RowsTensor,
    SlicesRows,
    TransformedRows,
    covers,
    flat_shape,
    stack_rows,
)
from mrl.weights.disk.stored_names import StoredNames, stored_key
from mrl.weights.disk.torch_dist_files import ArchiveRows, BlockLocation, StoredTensor, read_metadata
from mrl.weights.errors import WeightError
from mrl.weights.parameter_layout import TRANSFORMED, parameter_shape, segments, to_hf

OTHER_STATE = ("optimizer.", "chained_", "rng_state", "rerun_state")  # training state beside the model


class MegatronCheckpoint:
    """Tensors of a torch_dist directory under their Hugging Face names; tensors without such a name keep their key.

    Raises WeightError, which names directory and tensor, for missing or unreadable metadata, a tensor that is missing,
    of another shape or partly unwritten, and a truncated block.
    """

    def __init__(
        self, path: str | Path, names: StoredNames, arch: ModelArch, table: Mapping[str, ParameterMapping] | None = None
    ) -> None:
        """Opens the checkpoint. table: rows of the tensors to read; None: the model's weights"""
        self.path, self._arch, self._names = Path(path), arch, names
        self._stored = read_metadata(self.path)
        self._blocks: dict[str, dict[tuple[int, ...], list[BlockLocation]]] = {}
        rows = table or {**weight_table(arch, "critic"), **weight_table(arch, "policy")}
        self._home = {
            hf: (name, row, i) for name, row in rows.items() if row.copy_of is None for i, hf in enumerate(row.hf)
        }

        self._slices: dict[str, list[str]] = {}
        for hf in self._home:
            if (whole := slice_of(hf)) is not None:
                self._slices.setdefault(whole[0], []).append(hf)

    def _locate(self, name: str) -> tuple[str, tuple[int, ...]]:
        key, lead = self._names.locate(name)
        return stored_key(key, self._stored), lead

    def __contains__(self, name: str) -> bool:
        return name in self._home and self._locate(self._home[name][0])[0] in self._stored

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._home if name in self)
        known = {self._locate(row_name)[0] for row_name, _, _ in self._home.values()}
        yield from (key for key in self._stored if key not in known and not key.startswith(OTHER_STATE))

    def close(self) -> None:
        """Does nothing: no file stays open between two reads."""

    def source(self, name: str, shape: tuple[int, ...]) -> RowsTensor:
        return RowsTensor(self.rows(name), shape)

    def rows(self, name: str) -> Rows:
        """Returns the tensor `name` unread, joined from all its slices if Hugging Face files store them in one
        tensor.
        """
        if name in self._slices:
            return SlicesRows(tuple(map(self.rows, self._slices[name])))
        row_name, row, index = self._home[name]
        parameter = self._parameter(row_name, row)
        if row.kind in TRANSFORMED:
            transform, shape = partial(_to_hf_values, row, self._arch), flat_shape(row.shapes[0])
            return TransformedRows(parameter, transform, parameter_shape(row), shape)
        parts, at = [], 0
        for segment in segments(row, self._arch):
            if segment.source == index:
                parts.append((segment.start, (parameter, at, segment.rows)))
            at += segment.rows
        return stack_rows([part for _, part in sorted(parts, key=lambda each: each[0])])

    def _parameter(self, name: str, row: ParameterMapping) -> AssembledRows:
        """Returns the Megatron parameter, assembled from its blocks, without padded rows of the vocabulary."""
        key, lead = self._locate(name)
        if key not in self._stored:
            raise WeightError(f"{self.path}: no tensor {key}, which holds {', '.join(row.hf)}")
        stored = self._stored[key]
        wanted = flat_shape(parameter_shape(row))
        found = flat_shape(stored.shape[len(lead) :] or (0,))
        fits = len(stored.shape) == len(lead) + len(row.shapes[0]) and found[1] == wanted[1]
        fits &= found[0] >= wanted[0] if row.kind == "vocab" else found[0] == wanted[0]
        if not fits or any(at >= size for at, size in zip(lead, stored.shape, strict=False)):
            message = f"{self.path}: {key} has shape {list(stored.shape)}, and config.json requires {list(wanted)}"
            raise WeightError(f"{message} at {list(lead)}" if lead else message)
        pieces = tuple(self._pieces(key, stored, lead))
        if not covers(pieces, found):
            raise WeightError(f"{self.path}: parts of {key} at {list(lead)} are missing or duplicated")
        return AssembledRows(pieces, wanted, stored.dtype)

    def _pieces(self, key: str, stored: StoredTensor, lead: tuple[int, ...]) -> Iterator[MatrixPiece]:
        if key not in self._blocks:
            self._blocks[key] = _by_lead(stored, len(lead))
        for item in self._blocks[key].get(lead, []):
            sizes, at = item.sizes or (), item.offsets
            rows, columns = flat_shape(sizes[len(lead) :])
            stacked_in_item = torch.Size(sizes[: len(lead)]).numel()
            index = 0
            for wanted, offset, size in zip(lead, at, sizes, strict=False):
                index = index * size + wanted - offset
            column = at[-1] if len(sizes) - len(lead) > 1 else 0
            source = ArchiveRows(self.path, item, stored.dtype, (stacked_in_item * rows, columns))
            yield MatrixPiece(at[len(lead)], rows, source, index * rows, column)


def _to_hf_values(row: ParameterMapping, arch: ModelArch, values: Tensor) -> Tensor:
    return to_hf(row, [values], arch)[0]


def _by_lead(stored: StoredTensor, dimensions: int) -> dict[tuple[int, ...], list[BlockLocation]]:
    blocks: dict[tuple[int, ...], list[BlockLocation]] = {}
    for item in stored.items:
        ranges = [range(at, at + size) for at, size in zip(item.offsets, item.sizes or (), strict=False)][:dimensions]
        for lead in product(*ranges):
            blocks.setdefault(lead, []).append(item)
    return blocks
