"""Parameters of a rank, and their layout in Megatron's buffers and optimizer, exact to the byte.

Sizes come from the weight table; the order is that of the local layers' modules, which determines the padding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from mrl.config.sections.models import ParallelConfig
from mrl.families import ModelArch
from mrl.families.adapters import LoRA, adapter_table
from mrl.families.rows import ParameterMapping
from mrl.families.table import EMBEDDING, OUTPUT, VALUE_HEAD, VOCAB_ALIGN_GPU, Role, padded_vocab_size, weight_table
from mrl.families.vision import TOWER
from mrl.plan.buffers import Buffer, plan_buffer
from mrl.plan.grid import Grid, RankCoordinates, chunk_layers

_LAYER = "decoder.layers."
FINAL_NORM = "decoder.final_layernorm.weight"
MODULES = (  # of a layer, in the order of its parameters
    "input_layernorm",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.linear_q_down_proj",  # of latent attention, as the next four
    "self_attention.linear_q_up_proj",
    "self_attention.linear_q_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.dt_bias",  # of gated delta nets, as the next five
    "self_attention.A_log",
    "self_attention.in_proj",
    "self_attention.conv1d",
    "self_attention.out_norm",
    "self_attention.out_proj",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "self_attn_bda.",
    "pre_mlp_layernorm",
    "mlp.",
    "mlp_bda.",
)
BUCKET, BUCKET_A_REPLICA = 40_000_000, 1_000_000  # elements after which Megatron closes a bucket, if reduction overlaps
GRADIENT_BYTES = 4  # float32, whatever the weights' dtype
ADAM_BYTES = 8  # mean and mean square of the gradients, float32
MAIN_BYTES = 4  # float32 weights beside bfloat16 ones
Kind = Literal["dense", "expert", "wide"]
KINDS: tuple[Kind, ...] = ("dense", "expert", "wide")  # of buffers: one each, unless empty


@dataclass(frozen=True)
class Parameter:
    """Parameter of a rank.

    expert: it is in the experts' buffer (without expert parallelism experts are with the rest).
    apart: it has its own bucket (both copies of a tied embedding).
    """

    name: str
    numel: int
    expert: bool = False
    apart: bool = False

    def kind(self, wide_head: bool) -> Kind:
        """Returns the kind of its buffer. wide_head: the score head is float32, and other weights are not."""
        if self.name == VALUE_HEAD and wide_head:
            return "wide"
        return "expert" if self.expert else "dense"


def chunks(arch: ModelArch, role: Role, layout: ParallelConfig, coords: RankCoordinates) -> list[tuple[Parameter, ...]]:
    """Returns a rank's parameters by chunk of its stage, each in the order of `named_parameters`.

    Layers are counted over the whole model, experts over the rank's.
    """
    return [_chunk(arch, role, layout, coords.pp, number) for number in range(layout.virtual_pipeline or 1)]


@lru_cache(maxsize=512)
def _chunk(arch: ModelArch, role: Role, layout: ParallelConfig, stage: int, number: int) -> tuple[Parameter, ...]:
    last_chunk = (layout.virtual_pipeline or 1) - 1
    is_first = stage == 0 and number == 0
    is_last = stage == layout.pipeline - 1 and number == last_chunk
    table, tied = weight_table(arch, role), role == "policy" and arch.tied_embeddings
    apart = tied and layout.pipeline > 1
    found: list[Parameter] = []

    def take(name: str, apart: bool = False) -> None:
        found.append(Parameter(name, local_numel(table[name], arch, layout), apart=apart))

    if is_first:
        take(EMBEDDING, apart)
    for index in chunk_layers(layout, arch.num_layers, stage)[number]:
        layer = _kind_of_layer(arch, arch.layers.index(arch.layers[index]), layout)  # layers of a kind are equal
        found += [Parameter(f"{_LAYER}{index}.{each.name}", each.numel, each.expert) for each in layer]
    if is_last:
        take(FINAL_NORM)
        if role == "critic":
            take(VALUE_HEAD)
        elif not (tied and is_first):
            take(OUTPUT, apart)
    for name in table if is_first else ():
        if name.startswith(TOWER):
            take(name)
    return tuple(found)


@lru_cache(maxsize=256)
def _kind_of_layer(arch: ModelArch, index: int, layout: ParallelConfig) -> tuple[Parameter, ...]:
    """Parameters of a layer, under their names inside it."""
    return tuple(_of_layer(weight_table(arch), arch, index, layout))


def _of_layer(
    table: Mapping[str, ParameterMapping], arch: ModelArch, index: int, layout: ParallelConfig
) -> Iterator[Parameter]:
    """Yields this rank's parameters of a layer in the order of its modules, under their names inside it."""
    prefix, local = f"{_LAYER}{index}.", arch.experts.count // layout.expert if arch.experts is not None else 0
    rows = {name.removeprefix(prefix): row for name, row in table.items() if name.startswith(prefix)}
    for module in MODULES:
        for name, row in rows.items():
            expert = name.partition(".local_experts.")[2].partition(".")[0]
            if name.startswith(module) and not row.frozen and not (row.expert and int(expert) >= local):
                yield Parameter(name, local_numel(row, arch, layout), row.expert and layout.expert > 1)


@lru_cache(maxsize=512)
def matrices(arch: ModelArch, role: Role, layout: ParallelConfig, stage: int, ends: int) -> int:
    """Returns the elements of a stage rank's layer matrices, including experts', without `ends` layers at each end."""
    inner = tuple(f"{_LAYER}{index}." for index in range(ends, arch.num_layers - ends))
    return sum(
        each.numel
        for number in range(layout.virtual_pipeline or 1)
        for each in _chunk(arch, role, layout, stage, number)
        if ".linear_" in each.name and each.name.endswith(".weight") and each.name.startswith(inner)
    )


@lru_cache(maxsize=512)
def _trained_chunk(
    arch: ModelArch, role: Role, lora: LoRA, layout: ParallelConfig, stage: int, number: int
) -> tuple[Parameter, ...]:
    """Adapters and a value head of a chunk, ordered as in `_chunk`."""
    table, found = adapter_table(arch, role, lora), list[Parameter]()
    for index in chunk_layers(layout, arch.num_layers, stage)[number]:
        found += _of_layer(table, arch, index, layout)
    is_last = stage == layout.pipeline - 1 and number == (layout.virtual_pipeline or 1) - 1
    if is_last and role == "critic":
        found.append(Parameter(VALUE_HEAD, local_numel(table[VALUE_HEAD], arch, layout)))
    return tuple(found)


def local_numel(row: ParameterMapping, arch: ModelArch, layout: ParallelConfig) -> int:
    """Returns the elements of a rank's part of a row's parameter."""
    if row.kind == "vocab":
        return padded_vocab_size(arch, layout.tensor, VOCAB_ALIGN_GPU) * arch.hidden_size // layout.tensor
    whole = sum(prod(shape) for shape in row.shapes)
    parts = layout.expert_tensor_size if row.expert else layout.tensor
    return whole // parts if row.tp_dim is not None else whole


@dataclass(frozen=True)
class Elements:
    """weights: elements of parameters; buffer: in a trained model's buffers, with padding; shard: updated by this
    rank.
    """

    weights: int
    buffer: int
    shard: int


@dataclass(frozen=True)
class ModelElements(Elements):
    """Elements of one model on one rank.

    frozen: parameters outside of buffers, beside adapters or of a frozen vision tower
    wide: those of all that are float32 although the model is not
    """

    frozen: int = 0
    wide: Elements = Elements(0, 0, 0)

    @staticmethod
    def sharing(each: Sequence[ModelElements]) -> ModelElements:
        """Returns the elements of several models that share their frozen parameters."""
        frozen = each[0].frozen
        return ModelElements(
            weights=frozen + sum(own.weights - frozen for own in each),
            buffer=sum(own.buffer for own in each),
            shard=sum(own.shard for own in each),
            frozen=frozen,
            wide=Elements(
                weights=sum(own.wide.weights for own in each),
                buffer=sum(own.wide.buffer for own in each),
                shard=sum(own.wide.shard for own in each),
            ),
        )

    def weight_bytes(self, dtype: int, trained: bool) -> int:
        wide = self.wide.buffer if trained else self.wide.weights
        return dtype * (self.frozen + self.buffer if trained else self.weights) + (MAIN_BYTES - dtype) * wide

    def gradient_bytes(self) -> int:
        return GRADIENT_BYTES * self.buffer

    def optimizer_bytes(self, dtype: int) -> int:
        """Returns the bytes of float32 main weights (unless the weights are float32 themselves) and Adam's two
        moments.
        """
        mains = self.shard - self.wide.shard if dtype < MAIN_BYTES else 0
        return ADAM_BYTES * self.shard + MAIN_BYTES * mains


@lru_cache(maxsize=1 << 14)
def model_elements(
    arch: ModelArch,
    role: Role,
    grid: Grid,
    coords: RankCoordinates,
    overlap: bool = False,
    adapters: tuple[LoRA, ...] = (),
    tower: bool = False,
    wide_head: bool = True,
) -> ModelElements:
    """Returns the elements of a model on a rank.

    adapters: trained instead of the weights, which they share; tower: the vision tower is trained too; overlap:
    gradient reduction overlaps the backward pass, for which Megatron cuts the first stage's buffers into many padded
    buckets; wide_head: as for `Parameter.kind`.
    """
    if len(adapters) > 1:
        own = (model_elements(arch, role, grid, coords, overlap, (lora,), tower, wide_head) for lora in adapters)
        return ModelElements.sharing([*own])
    layout, lora = grid.layout, adapters[0] if adapters else None
    most = max(BUCKET, BUCKET_A_REPLICA * grid.dp) if overlap and coords.pp == 0 else None
    numbers = range(layout.virtual_pipeline or 1)
    dense, expert = (grid.dp * layout.context, coords.cp + layout.context * coords.dp), (grid.edp, coords.edp)
    kinds: list[tuple[Kind, tuple[int, int]]] = [("dense", dense), ("expert", expert)]
    if wide_head:
        kinds.append(("wide", dense))
    parts = [
        (kind, _buffer(arch, role, layout, coords.pp, number, kind, size, most, lora, tower, wide_head), rank)
        for number in numbers
        for kind, (size, rank) in kinds
    ]

    def elements(which: Collection[Kind]) -> Elements:
        found = [(buffer, rank) for kind, buffer, rank in parts if kind in which]
        return Elements(
            weights=sum(buffer.weights for buffer, _ in found),
            buffer=sum(buffer.numel for buffer, _ in found),
            shard=sum(buffer.shard(rank) for buffer, rank in found),
        )

    trained = elements(KINDS)
    frozen = 0
    for each in (each for chunk in chunks(arch, role, layout, coords) for each in chunk):
        if each.name.startswith(TOWER):
            frozen += 0 if tower else each.numel
        elif lora is not None and each.name != VALUE_HEAD:
            frozen += each.numel
    return ModelElements(trained.weights + frozen, trained.buffer, trained.shard, frozen, elements(["wide"]))


@lru_cache(maxsize=2048)
def _buffer(
    arch: ModelArch,
    role: Role,
    layout: ParallelConfig,
    stage: int,
    number: int,
    kind: Kind,
    size: int,
    most: int | None,
    lora: LoRA | None,
    tower: bool,
    wide_head: bool,
) -> Buffer:
    """most: as for `plan_buffer`."""
    of = layout, stage, number
    every = _chunk(arch, role, *of) if lora is None else _trained_chunk(arch, role, lora, *of)
    parameters = [each for each in every if each.kind(wide_head) == kind and (tower or not each.name.startswith(TOWER))]
    return plan_buffer([(each.numel, each.apart) for each in parameters], size, most)
