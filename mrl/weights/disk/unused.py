"""Tensors of a checkpoint that a model does not use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from mrl.families import ModelArch
from mrl.families.rows import ParameterMapping
from mrl.families.stacks import stored_shapes
from mrl.families.table import EMBEDDING, HF_OUTPUT, HF_VALUE_BIAS, Role
from mrl.weights.disk.draft_layers import is_draft
from mrl.weights.disk.mxfp4 import BLOCKS, SCALES
from mrl.weights.disk.rows import row_blocks
from mrl.weights.errors import WeightError

BUFFERS = ("rotary_emb.inv_freq",)  # old checkpoints hold them; they follow from config.json
COMPARED_BYTES = 32 << 20  # at once


class Checkpoint(Protocol):
    """Tensors on disk under their Hugging Face names."""

    path: Path

    def __contains__(self, name: str) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def source(self, name: str, shape: tuple[int, ...]) -> Any: ...

    def close(self) -> None: ...


def unused_tensors(
    checkpoint: Checkpoint,
    arch: ModelArch,
    table: Mapping[str, ParameterMapping],
    role: Role,
    *,
    compare_tied: bool = True,
) -> Iterator[str]:
    """Yields complaints about tensors that nothing uses, which includes one of two forms of the same weights. If
    config.json ties the output layer to the embedding, a separate output layer is allowed if it has the same values;
    `compare_tied` reads and compares both.
    """
    known = {name for row in table.values() for name in row.hf}
    known |= {alias.name for row in table.values() for alias in row.aliases}
    if role == "critic" or arch.tied_embeddings:
        known.add(HF_OUTPUT)
    stacks = {name: shape for name, shape in stored_shapes(table.values()).items() if name not in known}
    zeros = {HF_VALUE_BIAS: (arch.score_heads,)} if role == "critic" else {}
    names = set(checkpoint)
    yield from _twice(checkpoint.path, names, table)
    for name in checkpoint:
        if name in zeros:
            yield from _not_zero(checkpoint, name, zeros[name])
        elif (whole := name.removesuffix(BLOCKS).removesuffix(SCALES)) in stacks:
            yield from _more_slices(checkpoint, whole, stacks[whole])
        elif name not in known and not name.endswith(BUFFERS) and not is_draft(arch, name):
            yield f"{checkpoint.path}: the model does not use its tensor {name}"
    if compare_tied and role == "policy" and arch.tied_embeddings and HF_OUTPUT in checkpoint:
        yield from _untied(checkpoint, table[EMBEDDING])


def _twice(path: Path, names: set[str], table: Mapping[str, ParameterMapping]) -> Iterator[str]:
    """Yields a complaint for each tensor that the checkpoint has in another form too: joined, or packed."""
    found = {}
    for row in table.values():
        for name, alias in zip(row.hf, row.aliases, strict=False):
            if name != alias.name and name in names:
                found[alias.name] = name
    found |= {name + BLOCKS: name for name in names if name + BLOCKS in names}
    for other in sorted(names & found.keys()):
        yield f"{path}: {other} and {found[other]} are two forms of the same weights: remove one of them"


def _not_zero(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Iterator[str]:
    try:
        if bool(checkpoint.source(name, shape)[:].any()):
            yield f"{checkpoint.path}: its tensor {name} is not zero, and mrl's score heads have no bias"
    except WeightError as error:
        yield str(error)


def _more_slices(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Iterator[str]:
    """Yields a complaint if a tensor that is read by slices, possibly packed, has slices that nothing uses."""
    try:
        checkpoint.source(f"{name}[{shape[0]}]", shape[1:])
    except WeightError:
        return
    yield f"{checkpoint.path}: {name} has more than the {shape[0]} slices that config.json requires"


def _untied(checkpoint: Checkpoint, row: ParameterMapping) -> Iterator[str]:
    (name,), (shape,) = row.hf, row.shapes
    try:
        embedding, output = (checkpoint.source(each, shape) for each in (name, HF_OUTPUT))
        blocks = row_blocks((shape[0], shape[1]), output.dtype.itemsize, COMPARED_BYTES)
        same = all(torch.equal(embedding[a : a + n].float(), output[a : a + n].float()) for a, n in blocks)
    except WeightError as error:
        yield str(error)
        return
    if not same:
        yield (
            f"{output.label} differs from {name}, but config.json has tie_word_embeddings: true, which would drop it: "
            "set it to false, or remove the tensor"
        )
