"""Comparison of tensors between a Megatron checkpoint and a Hugging Face model: names, shapes and bits."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from mrl.families.rows import ParameterMapping
from mrl.families.table import weight_table
from mrl.weights.disk.draft_layers import draft_metas, open_drafts
from mrl.weights.disk.hf_rows import hf_rows
from mrl.weights.disk.megatron_dirs import MegatronModel
from mrl.weights.disk.megatron_source import MegatronCheckpoint
from mrl.weights.disk.rows import Rows, ZeroRows, flat_shape, row_blocks, tensor_memory
from mrl.weights.disk.safetensors_io import HFCheckpoint
from mrl.weights.disk.stored_names import StoredNames, pattern_of
from mrl.weights.disk.unused import unused_tensors
from mrl.weights.errors import WeightError

BLOCK_BYTES = 32 << 20


@dataclass
class TensorGroup:
    """Parameters of one kind, across layers and experts. dtypes: pairs of the Hugging Face and the Megatron dtype."""

    name: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: set[tuple[str, str]] = field(default_factory=set)
    tensors: int = 0
    nbytes: int = 0
    different: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison. problems: tensors that one side lacks, or that nothing uses."""

    groups: tuple[TensorGroup, ...]
    problems: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.problems and not any(group.different for group in self.groups)

    @property
    def cast_to(self) -> set[str]:
        """Dtypes that Megatron's side was cast to when it was written."""
        return {there for group in self.groups for here, there in group.dtypes if here != there}


def compare_tensors(hf: HFCheckpoint, model: MegatronModel, names: StoredNames, allow_pickle: bool) -> Comparison:
    """Compares bit for bit; if the dtypes differ, after casting Hugging Face's tensor as a conversion would.

    A value head that the Hugging Face directory lacks must be zero.
    """
    table = weight_table(model.arch, model.role)
    megatron = MegatronCheckpoint(model.weights, names, model.arch)
    problems = [*unused_tensors(hf, model.arch, table, model.role)]
    problems += unused_tensors(megatron, model.arch, table, model.role)
    groups: dict[str, TensorGroup] = {}
    for name, row in table.items():
        if row.copy_of is not None:
            continue
        kind = pattern_of(name)
        group = groups.setdefault(kind, TensorGroup(kind, tuple(map(pattern_of, row.hf)), row.shapes))
        for index, hf_name in enumerate(row.hf):
            try:
                here, there = _here(hf, row, index, allow_pickle), megatron.rows(hf_name)
                _compare(group, hf_name, here, there)
            except WeightError as error:
                problems.append(str(error))
    try:
        problems += _compare_drafts(groups, hf, model, allow_pickle)
    except WeightError as error:
        problems.append(str(error))
    return Comparison(tuple(groups.values()), tuple(dict.fromkeys(problems)))


def _compare_drafts(
    groups: dict[str, TensorGroup], hf: HFCheckpoint, model: MegatronModel, allow_pickle: bool
) -> Iterator[str]:
    """Compares the tensors of MTP layers, which Megatron's side has in Hugging Face's form; yields those that one side
    lacks.
    """
    here, there = (
        {meta.name: meta for meta in draft_metas(path, model.arch, model.role, allow_pickle)}
        for path in (hf.path, model.drafts)
    )
    for path, names in ((hf.path, there.keys() - here.keys()), (model.drafts, here.keys() - there.keys())):
        yield from (f"{path} lacks {name}, of a multi-token prediction layer" for name in sorted(names))
    if model.drafts is None or not here:
        return
    with open_drafts(model.drafts, allow_pickle) as copied:
        for name in here.keys() & there.keys():
            kind, row = pattern_of(name), ParameterMapping("copy", (name,), (here[name].shape,))
            group = groups.setdefault(kind, TensorGroup("copied: MTP layers", (kind,), row.shapes))
            _compare(group, name, *(hf_rows(one, row, 0, allow_pickle) for one in (hf, copied)))


def _here(hf: HFCheckpoint, row: ParameterMapping, index: int, allow_pickle: bool) -> Rows:
    if row.optional and row.hf[index] not in hf:
        return ZeroRows(flat_shape(row.shapes[index]), torch.float32)
    return hf_rows(hf, row, index, allow_pickle)


def _compare(group: TensorGroup, name: str, here: Rows, there: Rows) -> None:
    wrong = _differing(here, there)
    group.tensors += 1
    group.nbytes += there.shape[0] * there.shape[1] * there.dtype.itemsize
    written = there.dtype if isinstance(here, ZeroRows) else here.dtype
    group.dtypes.add((_short(written), _short(there.dtype)))
    if wrong:
        group.different.append(f"{name}: {wrong} of {there.shape[0] * there.shape[1]} values")


def _differing(here: Rows, there: Rows) -> int:
    """Returns the number of values with different bits, in Megatron's dtype. Reads both sides in parallel, block by
    block.
    """
    wrong = 0
    with ThreadPoolExecutor(2) as readers:
        for start, count in row_blocks(there.shape, there.dtype.itemsize, BLOCK_BYTES):
            pair = [torch.empty(count, there.shape[1], dtype=there.dtype) for _ in range(2)]
            list(readers.map(lambda rows, out, start=start: rows.read(start, out), (here, there), pair))
            if tensor_memory(pair[0]) != tensor_memory(pair[1]):
                raw = [values.view(torch.uint8).view(-1, there.dtype.itemsize) for values in pair]
                wrong += int((raw[0] != raw[1]).any(1).sum())
    return wrong


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
