"""Plan of a conversion: the files to write and the source rows of each part, from names and shapes alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from mrl.families import ModelArch
from mrl.families.rows import ParameterMapping
from mrl.families.stacks import stored_shapes
from mrl.families.table import Role, weight_table
from mrl.weights.convert.blocks import Block, FileRange, TensorBlock
from mrl.weights.disk.hf_rows import parameter_rows, source_dtypes
from mrl.weights.disk.megatron_source import MegatronCheckpoint
from mrl.weights.disk.rows import Rows, ZeroRows, flat_shape, row_blocks
from mrl.weights.disk.safetensors_header import FLOATS
from mrl.weights.disk.safetensors_io import HFCheckpoint
from mrl.weights.disk.stored_names import StoredNames, leading_shape
from mrl.weights.disk.torch_dist_files import pickle_object
from mrl.weights.errors import WeightError
from mrl.weights.meta import COPIED, TensorMeta
from mrl.weights.model.export import OutputFile, plan_files
from mrl.weights.parameter_layout import parameter_shape


@dataclass(frozen=True)
class SourceModel:
    """Model to convert; `names` are those of its Megatron side."""

    path: Path
    arch: ModelArch
    role: Role
    names: StoredNames


@dataclass
class TorchDistPlan:
    """Plan of a torch_dist checkpoint: blocks to write, shape and dtype of each key, and the empty objects that
    Megatron's layers require.
    """

    blocks: list[Block] = field(default_factory=list)
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    objects: list[tuple[str, bytes]] = field(default_factory=list)


@dataclass
class SafetensorsPlan:
    blocks: list[Block] = field(default_factory=list)
    files: list[OutputFile] = field(default_factory=list)


def plan_torch_dist(
    checkpoint: HFCheckpoint, source: SourceModel, dtype: torch.dtype | None, allow_pickle: bool, bucket_bytes: int
) -> TorchDistPlan:
    """Plans a torch_dist checkpoint. Raises WeightError if the tensors of one key have several dtypes and `dtype` is
    None.
    """
    found = {
        name: (row, parameter_rows(checkpoint, row, source.arch, allow_pickle))
        for name, row in weight_table(source.arch, source.role).items()
        if row.copy_of is None
    }
    dtypes = _dtypes(found, source, dtype)
    plan = TorchDistPlan(objects=[(key, pickle_object(None)) for key in _objects(source)])
    for name, (row, rows) in found.items():
        key, lead = source.names.locate(name)
        inner = parameter_shape(row)[1:]
        shape = (*leading_shape(source.arch, len(lead)), rows.shape[0], *inner)
        plan.tensors[key] = shape, dtypes[key]
        for start, count in row_blocks(rows.shape, dtypes[key].itemsize, bucket_bytes):
            at = (*lead, start, *(0 for _ in inner))
            place = TensorBlock(key, at, (*(1 for _ in lead), count, *inner))
            plan.blocks.append(Block(rows, start, count, dtypes[key], place))
    return plan


def _dtypes(
    found: Mapping[str, tuple[ParameterMapping, Rows]], source: SourceModel, chosen: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Returns the dtype of each key. Zeros in place of a missing value head take the dtype of the others."""
    by_key: dict[str, set[torch.dtype]] = {}
    for name, (_, rows) in found.items():
        by_key.setdefault(source.names.locate(name)[0], set()).update(source_dtypes(rows))
    if chosen is not None:
        kept = {source.names.locate(name)[0] for name, (row, _) in found.items() if row.frozen}
        return {key: torch.float32 if key in kept else chosen for key in by_key}
    mixed = [f"{key} ({', '.join(sorted(map(str, kinds)))})" for key, kinds in by_key.items() if len(kinds) > 1]
    if mixed:
        what = "tensors to be fused have several dtypes: choose one with --dtype"
        raise WeightError(f"{source.path}: {what}: {'; '.join(mixed)}")
    common = next(iter(set().union(*by_key.values())))
    return {key: next(iter(kinds), common) for key, kinds in by_key.items()}


def _objects(source: SourceModel) -> Iterator[str]:
    for key, shape in source.names.objects:
        for lead in product(*map(range, shape)):
            yield ShardedObject(key, None, shape, lead).unique_key


def plan_safetensors(
    checkpoint: MegatronCheckpoint,
    source: SourceModel,
    directory: Path,
    dtype: torch.dtype | None,
    max_file_bytes: int,
    bucket_bytes: int,
    copied: Sequence[TensorMeta],
) -> SafetensorsPlan:
    """Plans the blocks of the files from `plan_files`, in `directory`; `create_files` makes these files.

    copied: tensors that `copy_drafts` writes, to files of their own
    """
    table = weight_table(source.arch, source.role)
    shapes = stored_shapes(table.values())
    found: dict[str, Rows] = {name: checkpoint.rows(name) for name in shapes}
    kept = {name for row in table.values() if row.frozen for name in row.hf}
    for row in table.values():
        for name, shape in row.zeros:
            shapes[name], found[name] = shape, ZeroRows(flat_shape(shape), found[row.hf[0]].dtype)
    metas = [
        TensorMeta(name, shapes[name], rows.dtype if name in kept else dtype or rows.dtype, 0)
        for name, rows in found.items()
    ]
    plan = SafetensorsPlan(files=plan_files([*metas, *copied], max_file_bytes))
    for file in (file for file in plan.files if file.sender != COPIED):
        at = len(header_of(file.tensors))
        for meta in file.tensors:
            rows = found[meta.name]
            for start, count in row_blocks(rows.shape, meta.dtype.itemsize, bucket_bytes):
                offset = at + start * rows.shape[1] * meta.dtype.itemsize
                plan.blocks.append(Block(rows, start, count, meta.dtype, FileRange(directory / file.name, offset)))
            at += meta.nbytes
    return plan


def header_of(tensors: Sequence[TensorMeta]) -> bytes:
    """Returns the header of a safetensors file; the tensors follow it, one after the other."""
    names = {dtype: name for name, dtype in FLOATS.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for meta in tensors:
        entry = {"dtype": names[meta.dtype], "shape": list(meta.shape), "data_offsets": [at, at + meta.nbytes]}
        header[meta.name] = entry
        at += meta.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def create_files(files: Sequence[OutputFile], directory: Path) -> None:
    """Creates the files with blocks, of their final size: header, and space for the tensors."""
    for file in (file for file in files if file.sender != COPIED):
        header = header_of(file.tensors)
        with (directory / file.name).open("xb") as out:
            out.write(header)
            out.truncate(len(header) + sum(meta.nbytes for meta in file.tensors))
