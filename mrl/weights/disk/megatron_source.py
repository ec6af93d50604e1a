"""A Megatron checkpoint read as if it were a Hugging Face one: the same names, the same slices, any layout on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from mrl.families import ModelArch
from mrl.families.rows import Row
from mrl.families.stacks import slice_of
from mrl.families.table import weight_table
from mrl.weights.disk.rows import Mosaic, Piece, Rows, RowsTensor, SlicesRows, TurnedRows, covers, flat_shape, stacked
from mrl.weights.disk.stored_names import Names, stored_key
from mrl.weights.disk.torch_dist_files import ArchiveRows, Extent, StoredTensor, read_metadata
from mrl.weights.errors import WeightError
from mrl.weights.kinds import TURNED, parameter_shape, segments, to_hf

OTHER_STATE = ("optimizer.", "chained_", "rng_state", "rerun_state")  # of training, beside the model


class MegatronCheckpoint:
    """The tensors of a torch_dist directory under their Hugging Face names; what has none keeps its key.

    Raises WeightError, naming directory and tensor, for: no or unreadable metadata, a tensor that is not there, of
    another shape or with parts that nobody has written, a block that is cut off.
    """

    def __init__(self, path: str | Path, names: Names, arch: ModelArch, table: Mapping[str, Row] | None = None) -> None:
        """table: of what is read; None: the model's weights"""
        self.path, self._arch, self._names = Path(path), arch, names
        self._stored = read_metadata(self.path)
        self._blocks: dict[str, dict[tuple[int, ...], list[Extent]]] = {}
        rows = table or {**weight_table(arch, "critic"), **weight_table(arch, "policy")}
        self._home = {
            hf: (name, row, i) for name, row in rows.items() if row.copy_of is None for i, hf in enumerate(row.hf)
        }

        self._slices: dict[str, list[str]] = {}
        for hf in self._home:
            if (whole := slice_of(hf)) is not None:
                self._slices.setdefault(whole[0], []).append(hf)

    def _place(self, name: str) -> tuple[str, tuple[int, ...]]:
        key, lead = self._names.place(name)
        return stored_key(key, self._stored), lead

    def __contains__(self, name: str) -> bool:
        return name in self._home and self._place(self._home[name][0])[0] in self._stored

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._home if name in self)
        known = {self._place(row_name)[0] for row_name, _, _ in self._home.values()}
        yield from (key for key in self._stored if key not in known and not key.startswith(OTHER_STATE))

    def close(self) -> None:
        """Nothing stays open between two reads."""

    def source(self, name: str, shape: tuple[int, ...]) -> RowsTensor:
        return RowsTensor(self.rows(name), shape)

    def rows(self, name: str) -> Rows:
        """The tensor `name`, of all its slices where files have them in one, unread."""
        if name in self._slices:
            return SlicesRows(tuple(map(self.rows, self._slices[name])))
        row_name, row, index = self._home[name]
        parameter = self._parameter(row_name, row)
        if row.kind in TURNED:
            turn, shape = partial(_turned_back, row, self._arch), flat_shape(row.shapes[0])
            return TurnedRows(parameter, turn, parameter_shape(row), shape)
        parts, at = [], 0
        for segment in segments(row, self._arch):
            if segment.source == index:
                parts.append((segment.start, (parameter, at, segment.rows)))
            at += segment.rows
        return stacked([part for _, part in sorted(parts, key=lambda each: each[0])])

    def _parameter(self, name: str, row: Row) -> Mosaic:
        """The Megatron parameter, put together from its blocks; padded rows of the vocabulary are left out."""
        key, lead = self._place(name)
        if key not in self._stored:
            raise WeightError(f"{self.path}: no tensor {key}, which holds {', '.join(row.hf)}")
        stored = self._stored[key]
        wanted = flat_shape(parameter_shape(row))
        found = flat_shape(stored.shape[len(lead) :] or (0,))
        fits = len(stored.shape) == len(lead) + len(row.shapes[0]) and found[1] == wanted[1]
        fits &= found[0] >= wanted[0] if row.kind == "vocab" else found[0] == wanted[0]
        if not fits or any(at >= size for at, size in zip(lead, stored.shape, strict=False)):
            message = f"{self.path}: {key} has shape {list(stored.shape)}, config.json asks for {list(wanted)}"
            raise WeightError(f"{message} at {list(lead)}" if lead else message)
        pieces = tuple(self._pieces(key, stored, lead))
        if not covers(pieces, found):
            raise WeightError(f"{self.path}: parts of {key} at {list(lead)} are missing or there twice")
        return Mosaic(pieces, wanted, stored.dtype)

    def _pieces(self, key: str, stored: StoredTensor, lead: tuple[int, ...]) -> Iterator[Piece]:
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
            yield Piece(at[len(lead)], rows, source, index * rows, column)


def _turned_back(row: Row, arch: ModelArch, values: Tensor) -> Tensor:
    return to_hf(row, [values], arch)[0]


def _by_lead(stored: StoredTensor, dimensions: int) -> dict[tuple[int, ...], list[Extent]]:
    blocks: dict[tuple[int, ...], list[Extent]] = {}
    for item in stored.items:
        ranges = [range(at, at + size) for at, size in zip(item.offsets, item.sizes or (), strict=False)][:dimensions]
        for lead in product(*ranges):
            blocks.setdefault(lead, []).append(item)
    return blocks
