"""The parameters that a rank holds, and how Megatron's buffers and optimizer lay them out: to the byte.

Sizes come from the weight table; the order is that of the local layers' modules, which decides where padding falls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod

from mrl.config.sections.models import ParallelConfig
from mrl.families import ModelArch
from mrl.families.rows import Row
from mrl.families.table import EMBEDDING, OUTPUT, VALUE_HEAD, Role, padded_vocab_size, weight_table
from mrl.plan.grid import Grid, Seat, chunk_layers

FINAL_NORM = "decoder.final_layernorm.weight"
MODULES = (  # of a layer, in the order of its parameters
    "input_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "pre_mlp_layernorm",
    "mlp.",
)
PARAM_ALIGN, BUCKET_ALIGN = 64, 128  # elements, of a parameter's start and a bucket's end: megatron-core 0.16
GRADIENT_BYTES = 4  # float32, whatever the weights are
ADAM_BYTES = 8  # mean and mean square of the gradients, float32
MAIN_BYTES = 4  # float32 weights beside bfloat16 ones


@dataclass(frozen=True)
class Parameter:
    """expert: it is in the experts' buffer (without expert parallelism they are with the rest).
    apart: it has a bucket of its own (both copies of a tied embedding)."""

    name: str
    numel: int
    expert: bool = False
    apart: bool = False


def chunks(arch: ModelArch, role: Role, layout: ParallelConfig, seat: Seat) -> list[tuple[Parameter, ...]]:
    """A rank's parameters by chunk of its stage, each in the order of `named_parameters`."""
    return [_chunk(arch, role, layout, seat.pp, seat.ep, number) for number in range(layout.virtual_pipeline or 1)]


@lru_cache(maxsize=512)
def _chunk(
    arch: ModelArch, role: Role, layout: ParallelConfig, stage: int, ep: int, number: int
) -> tuple[Parameter, ...]:
    last_chunk = (layout.virtual_pipeline or 1) - 1
    is_first = stage == 0 and number == 0
    is_last = stage == layout.pipeline - 1 and number == last_chunk
    table, tied = weight_table(arch, role), role == "policy" and arch.tied_embeddings
    apart = tied and layout.pipeline > 1
    found: list[Parameter] = []

    def take(name: str, apart: bool = False) -> None:
        row = table[name]
        found.append(Parameter(name, local_numel(row, arch, layout), row.expert and layout.expert > 1, apart))

    if is_first:
        take(EMBEDDING, apart)
    for layer in chunk_layers(layout, arch.num_layers, stage)[number]:
        for name in _layer(arch, layer, layout.expert, ep):
            take(name)
    if is_last:
        take(FINAL_NORM)
        if role == "critic":
            take(VALUE_HEAD)
        elif not (tied and is_first):
            take(OUTPUT, apart)
    return tuple(found)


def _layer(arch: ModelArch, index: int, ep_size: int, ep: int) -> Iterator[str]:
    """Names of a layer's parameters that expert-parallel rank `ep` has."""
    table, prefix = weight_table(arch), f"decoder.layers.{index}."
    local = arch.experts.count // ep_size if arch.experts is not None else 0
    names = _names_by_layer(arch)[index]
    for module in MODULES:
        for name in names:
            if name.startswith(prefix + module) and (
                not table[name].expert or ep * local <= _expert(name) < (ep + 1) * local
            ):
                yield name


@lru_cache(maxsize=16)
def _names_by_layer(arch: ModelArch) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in range(arch.num_layers)]
    for name in weight_table(arch):
        if name.startswith("decoder.layers."):
            found[int(name.split(".")[2])].append(name)
    return found


def _expert(name: str) -> int:
    return int(name.partition(".local_experts.")[2].partition(".")[0])


def local_numel(row: Row, arch: ModelArch, layout: ParallelConfig) -> int:
    """Elements of a rank's part of a row's parameter."""
    if row.kind == "vocab":
        return padded_vocab_size(arch, layout.tensor) * arch.hidden_size // layout.tensor
    whole = sum(prod(shape) for shape in row.shapes)
    parts = layout.expert_tensor_size if row.expert else layout.tensor
    return whole // parts if row.tp_dim is not None else whole


@dataclass(frozen=True)
class Held:
    """Elements of one model on one rank.

    weights: parameters; buffer: as they lie in a trained model's buffers, with padding; shard: of these, those that
    this rank's optimizer updates
    """

    weights: int
    buffer: int
    shard: int

    def weight_bytes(self, dtype: int, trained: bool) -> int:
        return dtype * (self.buffer if trained else self.weights)

    def gradient_bytes(self) -> int:
        return GRADIENT_BYTES * self.buffer

    def optimizer_bytes(self, dtype: int) -> int:
        """Float32 main weights, which float32 weights are themselves, and Adam's two moments."""
        return self.shard * (ADAM_BYTES + (MAIN_BYTES if dtype < MAIN_BYTES else 0))


def held(arch: ModelArch, role: Role, grid: Grid, seat: Seat) -> Held:
    layout = grid.layout
    owned = chunks(arch, role, layout, seat)
    dense, expert = (grid.dp * layout.context, seat.cp + layout.context * seat.dp), (grid.edp, seat.edp)
    buffers = [
        _Buffer.of(tuple(p for p in chunk if p.expert == is_expert), size)
        for chunk in owned
        for is_expert, (size, _) in ((False, dense), (True, expert))
    ]
    ranks = [rank for _ in owned for rank in (dense[1], expert[1])]
    return Held(
        weights=sum(p.numel for chunk in owned for p in chunk),
        buffer=sum(buffer.numel for buffer in buffers),
        shard=sum(buffer.shard(rank) for buffer, rank in zip(buffers, ranks, strict=True)),
    )


@dataclass(frozen=True)
class _Buffer:
    """One of Megatron's: parameters back to front, cut into buckets that `size` data-parallel ranks share evenly.

    places: (start, end) of the parameters; buckets: of the buckets, padded
    """

    places: tuple[tuple[int, int], ...]
    buckets: tuple[tuple[int, int], ...]
    size: int

    @staticmethod
    @lru_cache(maxsize=2048)
    def of(parameters: Sequence[Parameter], size: int) -> _Buffer:
        unit = lcm(size, BUCKET_ALIGN)
        places, buckets, begin, end = [], [], 0, 0
        for parameter in reversed(parameters):
            start = _up(end, PARAM_ALIGN)
            if parameter.apart and places and places[-1][0] >= begin:
                buckets.append((begin, _up(start, unit)))
                begin = start = buckets[-1][1]
            end = start + parameter.numel
            places.append((start, end))
            if parameter.apart:
                buckets.append((begin, _up(end, unit)))
                begin = end = buckets[-1][1]
        if places and places[-1][0] >= begin:
            buckets.append((begin, _up(end, unit)))
        return _Buffer(tuple(places), tuple(buckets), size)

    @property
    def numel(self) -> int:
        return self.buckets[-1][1] if self.buckets else 0

    def shard(self, rank: int) -> int:
        """Elements of parameters in the rank's part of every bucket."""
        parts = [(start + rank * (end - start) // self.size, (end - start) // self.size) for start, end in self.buckets]
        return sum(max(0, min(end, at + length) - max(start, at)) for at, length in parts for start, end in self.places)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
