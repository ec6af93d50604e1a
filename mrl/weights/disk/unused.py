"""Tensors of a checkpoint that a model has no use for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from mrl.families import ModelArch
from mrl.families.rows import Row
from mrl.families.table import HF_EMBEDDING, HF_OUTPUT, Role
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
    checkpoint: Checkpoint, arch: ModelArch, table: Mapping[str, Row], role: Role, *, compare_tied: bool = True
) -> Iterator[str]:
    """Complaints about tensors that nothing takes. Where config.json ties the output layer to the embedding, one of
    its own may be there if it has the same values; `compare_tied` looks, and reads both."""
    known = {name for row in table.values() for name in row.hf}
    known |= {alias.name for row in table.values() for alias in row.aliases}
    if role == "critic" or arch.tied_embeddings:
        known.add(HF_OUTPUT)
    for name in checkpoint:
        if name not in known and not name.endswith(BUFFERS):
            yield f"{checkpoint.path}: nothing uses its tensor {name}"
    if compare_tied and role == "policy" and arch.tied_embeddings and HF_OUTPUT in checkpoint:
        yield from _untied(checkpoint, (arch.vocab_size, arch.hidden_size))


def _untied(checkpoint: Checkpoint, shape: tuple[int, int]) -> Iterator[str]:
    try:
        embedding, output = (checkpoint.source(name, shape) for name in (HF_EMBEDDING, HF_OUTPUT))
        blocks = row_blocks(shape, output.dtype.itemsize, COMPARED_BYTES)
        same = all(torch.equal(embedding[a : a + n].float(), output[a : a + n].float()) for a, n in blocks)
    except WeightError as error:
        yield str(error)
        return
    if not same:
        yield (
            f"{output.label} differs from {HF_EMBEDDING}, but config.json says tie_word_embeddings: true, which would "
            "drop it: set that to false, or remove the tensor"
        )
