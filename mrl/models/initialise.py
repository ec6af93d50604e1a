"""Random weights that depend only on the seed and the parameter's global name, never on the layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mrl.families import ModelArch
from mrl.families.rows import ParameterMapping
from mrl.families.table import VALUE_HEAD, Role, weight_table
from mrl.models.fp8_params import is_quantized, write
from mrl.models.naming import global_name
from mrl.parallel import Mesh

DECAYS = (1.0, 16.0)  # of gated delta nets' heads, from the first to the last
BLOCK_ROWS = 128  # part of the definition of the weights: every block has its own random stream


@torch.no_grad()
def initialise(chunk: nn.Module, arch: ModelArch, mesh: Mesh, role: Role, seed: int) -> None:
    """Fills matrices ~ normal(0, initializer_range); norms and decays as neutral ones; biases, the value head and the
    vocabulary's padding 0.

    Each rank generates the row blocks that it holds a part of and keeps its part: at most one block beyond its own
    weights is in memory. A tied output layer gets the embedding's values. Raises ValueError for a parameter that is not
    in the weight table.
    """
    table = weight_table(arch, role)
    for local_name, parameter in chunk.named_parameters():
        name = global_name(chunk, local_name)
        if name not in table:
            raise ValueError(f"parameter {name} of the model is not in the weight table of {arch.family}")
        row = table[name]
        if row.start == "normal":
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            values = drawn if is_quantized(parameter) else parameter
            _draw(values, row.copy_of or name, row, arch, mesh, seed)
            if values is drawn:
                write(parameter, drawn)
        elif row.start == "decays":
            parts, part = mesh.tensor_cut(row.expert)
            parameter.copy_(torch.linspace(*DECAYS, row.shapes[0][0]).log().chunk(parts)[part])
        else:
            parameter.fill_(0.0 if row.start == "zeros" else 1.0)


def _draw(parameter: Tensor, name: str, row: ParameterMapping, arch: ModelArch, mesh: Mesh, seed: int) -> None:
    parts, part = mesh.tensor_cut(row.expert) if row.tp_dim is not None else (1, 0)
    parameter = parameter.flatten(1)  # a view, for a vision tower's patch projection
    rows, cols = parameter.shape
    if row.tp_dim == 1:
        _fill(parameter, name, 0, arch.initializer_range, seed, part * cols, parts * cols)
    elif row.kind == "gate_up":  # each cut by itself
        half = rows // 2
        for index, target in enumerate(parameter.split(half)):
            _fill(target, name, (index * parts + part) * half, arch.initializer_range, seed, 0, cols)
    else:
        _fill(parameter, name, part * rows, arch.initializer_range, seed, 0, cols)
        if row.kind == "vocab":
            parameter[max(0, arch.vocab_size - part * rows) :] = 0.0


@torch.no_grad()
def draw_head(head: Tensor, std: float, seed: int) -> None:
    """Fills the score head [heads, h] with normal values, the same ones on every rank; no rank holds only a part of
    it.
    """
    _fill(head, VALUE_HEAD, 0, std, seed, 0, head.size(1))


def _fill(target: Tensor, name: str, first_row: int, std: float, seed: int, first_col: int, all_cols: int) -> None:
    """Fills target [r, c] with rows from first_row and columns from first_col of the whole matrix, all_cols wide."""
    done = 0
    for rows in _blocks(name, first_row, target.size(0), all_cols, seed):
        target[done : done + rows.size(0)] = rows[:, first_col : first_col + target.size(1)] * std
        done += rows.size(0)


def _blocks(name: str, first: int, count: int, cols: int, seed: int) -> Iterator[Tensor]:
    """Yields standard normal rows first .. first + count of the named matrix, block by block."""
    for block in range(first // BLOCK_ROWS, -(-(first + count) // BLOCK_ROWS)):
        digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
        stream = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        start = block * BLOCK_ROWS
        values = torch.randn(BLOCK_ROWS, cols, generator=stream)
        yield values[max(0, first - start) : min(BLOCK_ROWS, first + count - start)]
