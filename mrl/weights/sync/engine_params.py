"""The parameters of an engine: which of the exported Hugging Face tensors, cut and joined how, make each of them.

SGLang fuses q, k, v and gate, up, stacks experts, pads the vocabulary to a multiple of 64 rows and cuts everything over
its tensor-parallel ranks; an engine that keeps the Hugging Face names is the case without any of that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mrl.models.arch import ModelArch
from mrl.weights.sync.payload import TensorMeta, nbytes

VOCAB_MULTIPLE = 64
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_STACKED = re.compile(r"(?P<experts>.*\.experts)\.(?P<kind>w13_weight|w2_weight|gate_up_proj|down_proj)$")
_EXPERT_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_CUT_COLUMNS = re.compile(r"(o_proj|down_proj|w2)\.weight$")
_CUT_ROWS = re.compile(r"(gate_proj|up_proj|w1|w3)\.(weight|bias)$")
_VOCAB = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Part:
    """`size` rows (dim 0) or columns (dim 1) of an HF tensor, from `start`; the whole tensor with dim None."""

    name: str
    nbytes: int
    dim: int | None = None
    start: int = 0
    size: int = 0

    def cut(self, tensor: Tensor) -> Tensor:
        """The part of the exported tensor `tensor`: a view, of the same shape but for `dim`."""
        return tensor if self.dim is None else tensor.narrow(self.dim, self.start, self.size)


@dataclass(frozen=True)
class EngineParam:
    """A parameter of one engine process: the parts end to end in memory, then `padding` zero bytes."""

    name: str
    parts: tuple[Part, ...]
    padding: int = 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + self.padding

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.name for part in self.parts))


@dataclass(frozen=True)
class EngineShape:
    """What has to be known of an engine to say what it holds. `names`: its parameters, the same on all its ranks."""

    names: tuple[str, ...]
    tensor: int

    @property
    def fuses(self) -> bool:
        return any(".qkv_proj." in name for name in self.names)


def engine_params(
    shape: EngineShape, rank: int, metas: Sequence[TensorMeta], arch: ModelArch
) -> tuple[dict[str, EngineParam], list[str]]:
    """({engine name: its parts} of the engine's tensor-parallel rank `rank`, engine names that nothing here fills)."""
    cutter = _Cutter(shape, rank, {meta.name: meta for meta in metas}, arch)
    params: dict[str, EngineParam] = {}
    unknown: list[str] = []
    for name in shape.names:
        param = cutter.param(name)
        if param is None:
            unknown.append(name)
        else:
            params[name] = param
    return params, unknown


class _Cutter:
    def __init__(self, shape: EngineShape, rank: int, metas: Mapping[str, TensorMeta], arch: ModelArch) -> None:
        self.shape, self.rank, self.metas, self.arch = shape, rank, metas, arch
        self.tp = shape.tensor if shape.fuses else 1

    def param(self, name: str) -> EngineParam | None:
        """None when no exported tensor fills it."""
        sources = self._sources(name)
        if sources is None or any(source not in self.metas for source in sources):
            return None
        parts = tuple(self._part(self.metas[source]) for source in sources)
        padding = self._vocab_padding(parts[0]) if name in _VOCAB and self.shape.fuses else 0
        return EngineParam(name, parts, padding)

    def _sources(self, name: str) -> list[str] | None:
        stacked = _STACKED.match(name)
        if stacked and self.arch.num_experts:
            return self._expert_sources(stacked["experts"], stacked["kind"])
        for fused, pieces in _FUSED.items():
            if f".{fused}." in name:
                return [name.replace(f".{fused}.", f".{piece}.") for piece in pieces]
        if name == "lm_head.weight" and self.arch.tied_embeddings:
            return ["model.embed_tokens.weight"]
        return [name]

    def _expert_sources(self, experts: str, kind: str) -> list[str] | None:
        for gate, up, down in _EXPERT_NAMES:
            if f"{experts}.0.{gate}.weight" in self.metas:
                pieces = (gate, up) if kind in ("w13_weight", "gate_up_proj") else (down,)
                count = self.arch.num_experts or 0
                return [f"{experts}.{e}.{piece}.weight" for e in range(count) for piece in pieces]
        return None

    def _part(self, meta: TensorMeta) -> Part:
        cut = self._range(meta)
        if cut is None or self.tp == 1:
            return Part(meta.name, nbytes(meta))
        dim, start, size = cut
        return Part(meta.name, nbytes(meta) // meta.shape[dim] * size, dim, start, size)

    def _range(self, meta: TensorMeta) -> tuple[int, int, int] | None:
        """(dim, start, size) of this engine rank's share."""
        name, rows = meta.name, meta.shape[0]
        if name in _VOCAB:
            per_rank = self._vocab_rows()
            start = min(rows, self.rank * per_rank)
            return 0, start, min(rows, start + per_rank) - start
        if ".q_proj." in name:
            return 0, self.rank * (rows // self.tp), rows // self.tp
        if ".k_proj." in name or ".v_proj." in name:
            kv_heads = self.arch.num_kv_heads
            shares = min(kv_heads, self.tp)  # fewer heads than ranks: neighbours hold the same one
            return 0, self.rank * shares // self.tp * (rows // shares), rows // shares
        if _CUT_ROWS.search(name):
            return 0, self.rank * (rows // self.tp), rows // self.tp
        if _CUT_COLUMNS.search(name):
            columns = meta.shape[1] // self.tp
            return 1, self.rank * columns, columns
        return None

    def _vocab_rows(self) -> int:
        """Rows of the padded vocabulary on each engine rank."""
        multiple = VOCAB_MULTIPLE
        if _round_up(self.arch.vocab_size, multiple) % self.tp:
            multiple *= self.tp
        return _round_up(self.arch.vocab_size, multiple) // self.tp

    def _vocab_padding(self, part: Part) -> int:
        meta = self.metas[part.name]
        return self._vocab_rows() * (nbytes(meta) // meta.shape[0]) - part.nbytes


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
