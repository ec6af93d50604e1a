"""Parameters of an engine: the exported Hugging Face tensors that form each of them, and how they are sharded and
fused.

SGLang fuses q, k, v and gate, up, stacks experts, pads the vocabulary to a multiple of 64 rows and shards everything
over its tensor-parallel ranks. An engine that keeps the Hugging Face names is the case without any of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mrl.families import FAMILIES, ModelArch
from mrl.families.engine_names import VOCAB_MULTIPLE, HubTensor, fused_parameters, plain_parameters
from mrl.families.rows import ParameterMapping
from mrl.weights.meta import TensorMeta

WIDE_BYTES = 4  # of a float32


@dataclass(frozen=True)
class TensorShard:
    """Shard of an HF tensor for one engine parameter: `size` rows (dim 0) or columns (dim 1, ...), from `start`; the
    whole tensor if dim is None.

    transposed: in its last two dimensions; wide: in float32; nbytes: in the engine's memory
    """

    name: str
    nbytes: int
    dim: int | None = None
    start: int = 0
    size: int = 0
    transposed: bool = False
    wide: bool = False

    def cut(self, tensor: Tensor) -> Tensor:
        """Returns this part of the exported tensor `tensor`: a view of the same shape except for `dim`, or
        transposed.
        """
        part = tensor if self.dim is None else tensor.narrow(self.dim, self.start, self.size)
        return part.mT if self.transposed else part.float() if self.wide else part


@dataclass(frozen=True)
class EngineParam:
    """Parameter of one engine process: contiguous parts, then `padding` zero bytes."""

    name: str
    parts: tuple[TensorShard, ...]
    padding: int = 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + self.padding

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.name for part in self.parts))


@dataclass(frozen=True)
class EngineLayout:
    """Shape of an engine. `names`: its parameters, the same on all its ranks; tensor: tensor-parallel size."""

    names: tuple[str, ...]
    tensor: int

    @property
    def fuses(self) -> bool:
        return any(".qkv_proj." in name or ".gate_up_proj." in name for name in self.names)


def engine_params(
    shape: EngineLayout, rank: int, metas: Sequence[TensorMeta], arch: ModelArch
) -> tuple[dict[str, EngineParam], list[str]]:
    """Returns (parameters of the engine's tensor-parallel rank `rank` by engine name, engine names without source
    tensors).
    """
    cutter = _Sharder(shape, rank, {meta.name: meta for meta in metas}, arch)
    params: dict[str, EngineParam] = {}
    unknown: list[str] = []
    for name in shape.names:
        param = cutter.param(name)
        if param is None:
            unknown.append(name)
        else:
            params[name] = param
    return params, unknown


class _Sharder:
    def __init__(self, shape: EngineLayout, rank: int, metas: Mapping[str, TensorMeta], arch: ModelArch) -> None:
        self.shape, self.rank, self.metas, self.arch = shape, rank, metas, arch
        self.tp, self.cuts_vocab = shape.tensor if shape.fuses else 1, FAMILIES[arch.family].engine_cuts_vocab
        self.sources = fused_parameters(arch) if shape.fuses else plain_parameters(arch)

    def param(self, name: str) -> EngineParam | None:
        """Returns the engine parameter; None if no exported tensor fills it."""
        sources = self.sources.get(name, ())
        if not sources or any(source.name not in self.metas for source in sources):
            return None
        parts = tuple(part for source in sources for part in self._parts(source))
        is_padded = sources[0].row.kind == "vocab" and self.cuts_vocab
        padding = self._vocab_padding(parts[0]) if is_padded else 0
        if sources[0].is_stack and not parts[0].nbytes:  # output biases of experts: on rank 0 only, 0 elsewhere
            padding = _nbytes(sources[0], self.metas[sources[0].name], True)
        return EngineParam(name, parts, padding)

    def _parts(self, source: HubTensor) -> Iterator[TensorShard]:
        meta, first = self.metas[source.name], 0
        if source.is_stack:
            yield self._of_stack(source, meta)
            return
        if self.tp == 1:
            yield TensorShard(meta.name, meta.nbytes)
            return
        for index, rows in enumerate(source.row.pieces or meta.shape[:1], source.index):
            cut = self._range(source.row, index, rows, meta)
            if cut is None:
                yield TensorShard(meta.name, meta.nbytes)
            else:
                dim, start, size = cut
                yield TensorShard(meta.name, meta.nbytes // meta.shape[dim] * size, dim, first + start, size)
            first += rows

    def _of_stack(self, source: HubTensor, meta: TensorMeta) -> TensorShard:
        """Returns this engine rank's part of stacked experts: column-parallel up projection, row-parallel down
        projection.
        """
        transposed, wide = source.is_transposed and self.shape.fuses, source.is_wide and self.shape.fuses
        nbytes = _nbytes(source, meta, self.shape.fuses)
        if self.tp == 1:
            return TensorShard(meta.name, nbytes, transposed=transposed, wide=wide)
        if source.row.kind == "copy":
            whole = self.rank == 0
            return TensorShard(meta.name, nbytes * whole, 0, 0, meta.shape[0] * whole, wide=wide)
        dim = 1 if source.row.kind == "transposed" else len(meta.shape) - 1
        size = meta.shape[dim] // self.tp
        return TensorShard(meta.name, nbytes // self.tp, dim, self.rank * size, size, transposed, wide)

    def _range(self, row: ParameterMapping, index: int, rows: int, meta: TensorMeta) -> tuple[int, int, int] | None:
        """Returns (dim, start, size) of this engine rank's part of `rows` rows, which are number `index` of the
        row's.
        """
        kind = row.kind
        if kind == "vocab" and not self.cuts_vocab:
            return None
        if kind == "vocab":
            per_rank = self._vocab_rows()
            start = min(rows, self.rank * per_rank)
            return 0, start, min(rows, start + per_rank) - start
        if kind == "qkv" and index > 0:
            kv_heads = self.arch.num_kv_heads
            shares = min(kv_heads, self.tp)  # fewer heads than ranks: adjacent ranks hold the same head
            return 0, self.rank * shares // self.tp * (rows // shares), rows // shares
        if row.tp_dim is None or row.joined is not None:
            return None
        size = (meta.shape[1] if row.tp_dim else rows) // self.tp
        return row.tp_dim, self.rank * size, size

    def _vocab_rows(self) -> int:
        """Returns the number of rows of the padded vocabulary on each engine rank."""
        multiple = VOCAB_MULTIPLE
        if _round_up(self.arch.vocab_size, multiple) % self.tp:
            multiple *= self.tp
        return _round_up(self.arch.vocab_size, multiple) // self.tp

    def _vocab_padding(self, part: TensorShard) -> int:
        meta = self.metas[part.name]
        return self._vocab_rows() * (meta.nbytes // meta.shape[0]) - part.nbytes


def _nbytes(source: HubTensor, meta: TensorMeta, fused: bool) -> int:
    """Returns the size of an exported tensor in the engine's memory."""
    return meta.nbytes // meta.dtype.itemsize * WIDE_BYTES if fused and source.is_wide else meta.nbytes


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
