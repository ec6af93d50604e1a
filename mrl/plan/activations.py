"""Activation memory that the forward pass of one micro-batch keeps for the backward pass, in bytes a rank.

Local layers: as saved on a CPU, where a test measures it. transformer-engine's: read in its sources, not measured.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from mrl.config.sections.models import ParallelConfig, TrainConfig
from mrl.families import FAMILIES, LayerArch, ModelArch
from mrl.families.table import DELTA_CHUNK, SINK_CHANNELS, Role

LayerKind = Literal["local", "transformer_engine"]
FLOAT32, INT64 = 4, 8


@dataclass(frozen=True)
class Tokens:
    """Tokens of one micro-batch before the context-parallel cut.

    packed: all tokens; response: response tokens; sequence: tokens of a sequence; seen: tokens that take image features
    """

    packed: int
    response: int
    sequence: int
    seen: int = 0

    def local(self, cp: int) -> float:
        return self.packed / cp


@dataclass(frozen=True)
class Shapes:
    """Sizes of a rank's layers.

    `share`: the tokens between products under sequence parallelism; query and kv channels and heads are this rank's;
    dtype: element bytes. rounded: the fp8 cast of a product's input is kept; gathered: inputs are kept whole where
    sequence parallelism would keep a share, as in emulated layers
    """

    arch: ModelArch
    layout: ParallelConfig
    dtype: int
    kind: LayerKind
    tokens: Tokens
    rounded: bool = False
    gathered: bool = False

    @property
    def input(self) -> int:
        """Bytes of an element of a product's input."""
        return 1 if self.rounded else self.dtype

    @property
    def local(self) -> float:
        return self.tokens.local(self.layout.context)

    @property
    def share(self) -> float:
        has_sequence = self.layout.sequence and self.layout.tensor > 1
        return self.local / self.layout.tensor if has_sequence else self.local

    @property
    def heads(self) -> float:
        return self.arch.num_heads / self.layout.tensor

    @property
    def kv_heads(self) -> float:
        return self.arch.num_kv_heads / self.layout.tensor

    def norm(self, width: float, rows: float) -> float:
        """Bytes of an RMSNorm's input and its scales."""
        family = FAMILIES[self.arch.family]
        wide = family.wide_norms or family.shifted_norms
        return rows * (width * (FLOAT32 if wide else self.dtype) + FLOAT32)


def saved_bytes(
    arch: ModelArch, role: Role, train: TrainConfig, layers: range, dtype: int, kind: LayerKind, tokens: Tokens
) -> float:
    """Returns the bytes of one chunk with these layers, including head and embedding if it has the last or first
    layer.
    """
    shapes, fp8 = Shapes(arch, train.parallel, dtype, kind, tokens), train.precision.fp8
    ends = fp8.first_last_bf16 if fp8.recipe != "none" else arch.num_layers
    inner = range(ends, arch.num_layers - ends)
    kinds = Counter((arch.layers[index], index in inner) for index in layers)
    total = 0.0
    for (each, in_fp8), count in kinds.items():
        own = replace(shapes, rounded=in_fp8 and fp8.is_real, gathered=in_fp8 and fp8.emulate)
        total += count * layer_bytes(own, each, train.recompute)
    if layers.start == 0 and layers:
        total += shapes.local * (INT64 + (1 if train.parallel.tensor > 1 else 0))
    if kind == "local" and train.recompute == "none":
        total += shapes.local * arch.head_dim * dtype * len(arch.rope_tables)  # cosines and sines
    if layers.stop == arch.num_layers:
        total += _head(shapes, role)
    return total


def layer_bytes(shapes: Shapes, layer: LayerArch, recompute: str) -> float:
    """Returns the bytes of one layer."""
    entry = shapes.share * shapes.arch.hidden_size * shapes.dtype
    if recompute == "full":
        return entry
    whole = shapes.local if shapes.gathered else shapes.share
    rows = whole + (shapes.share if layer.experts else whole)  # of the outputs of the layer's two norms
    products = shapes.arch.hidden_size * shapes.input * rows
    family = FAMILIES[shapes.arch.family]
    norms = 2 * (family.norms_before + family.norms_behind) * shapes.norm(shapes.arch.hidden_size, shapes.share)
    again = recompute == "selective"
    attention = _attention(shapes, layer, again and shapes.kind == "local")
    return norms + products + attention + _feed_forward(shapes, layer, again)


def recomputed_bytes(s: Shapes, layer: LayerArch) -> float:
    """Returns the bytes that one layer's gated delta net holds while its backward pass computes it again.

    In float32 and full chunks: queries, keys and values in all their forms, products between the tokens of a chunk, and
    a state a chunk; with some gradients.
    """
    if not layer.delta or s.arch.delta is None:
        return 0.0
    delta, chunks = s.arch.delta, -(-s.tokens.sequence // DELTA_CHUNK) * DELTA_CHUNK / s.tokens.sequence
    numbers = 12 * delta.key + 10 * delta.value + 4 * DELTA_CHUNK + delta.key * delta.value / DELTA_CHUNK
    return s.local * chunks * delta.value_heads / s.layout.tensor * numbers * FLOAT32


def _attention(s: Shapes, layer: LayerArch, again: bool) -> float:
    """again: the core is recomputed in the backward pass, from its inputs; gated delta nets always are."""
    if layer.delta and s.arch.delta is not None:
        rows = s.arch.delta.rows
        return s.local * (sum(rows) * s.dtype + rows[3] * s.input) / s.layout.tensor
    d, b = s.arch.head_dim, s.dtype
    q, kv = s.local * s.heads * d * b, s.local * s.kv_heads * d * b
    keys = kv
    if s.layout.context > 1 and s.kind == "local":  # gathered; each of the two chunks has the keys up to its end
        keys = kv * s.layout.context * (1 + 1 / (2 * s.layout.context))
    joined = q + 2 * kv  # the product's result, which key and value are parts of, and the query where it is as wide
    query = 0.0 if s.heads == s.kv_heads else q
    if FAMILIES[s.arch.family].gated_attention:  # behind each query its gate; then the gates' sigmoids, and the product
        joined, query = joined + q, 2 * q
    normed = (query + joined + s.local * (s.heads + s.kv_heads) * FLOAT32) if s.arch.qk_norm else 0.0
    if FAMILIES[s.arch.family].norms_all_heads:  # in float32, before and after the scale
        normed += s.local * (s.heads + s.kv_heads) * d * FLOAT32 * (1 if b == FLOAT32 else 2)
    if FAMILIES[s.arch.family].gated_attention:
        normed += s.local * s.heads * d * FLOAT32 + q
    normed += _compressed(s)
    if again:
        return normed + (q + kv if s.arch.qk_norm else query + joined) + q
    out = 2 * q if s.kind == "local" else q  # in bucket order, and in token order
    out += s.local * s.heads * d * s.input if s.rounded else 0  # the core keeps its own
    statistics = s.local * s.heads * FLOAT32
    more = SINK_CHANNELS / d if FAMILIES[s.arch.family].sinks else 0.0  # of a query, a key, a value and a result
    return normed + q + 2 * keys + out + more * (2 * q + 2 * keys) + statistics + _mask(s, layer)


def _compressed(s: Shapes) -> float:
    """Bytes of MLA's latent vectors: whole, and this rank's normed share."""
    latent = s.arch.latent
    if latent is None:
        return 0.0
    ranks = [(latent.rank, latent.turned), *([(latent.query_rank, 0)] if latent.query_rank else [])]
    return sum(s.local * (rank + turned) * s.dtype + s.share * (rank * s.dtype + FLOAT32) for rank, turned in ranks)


def _mask(s: Shapes, layer: LayerArch) -> float:
    """Bytes of the numeric mask that torch's attention keeps for context parallelism, windows or sinks."""
    cp, length, sinks = s.layout.context, s.tokens.sequence, FAMILIES[s.arch.family].sinks
    if s.kind != "local" or (cp == 1 and not sinks and length <= (layer.window or length)):
        return 0.0
    if cp == 1:
        return s.tokens.packed * (length + sinks) * s.dtype
    chunk = length / (2 * cp)
    return s.tokens.packed / length * ((2 * cp + 1) * chunk**2 + 2 * sinks * chunk) * s.dtype


def _feed_forward(s: Shapes, layer: LayerArch, again: bool) -> float:
    """again: a dense MLP is recomputed in the backward pass, and the activation of transformer-engine's experts."""
    if not layer.experts or s.arch.experts is None:
        return 0.0 if again else _gated(s, layer.ffn_size)
    chosen, cut = s.arch.experts.per_token, s.layout.expert_tensor_size
    routed = s.share * chosen * cut  # tokens of this rank's experts, if evenly loaded
    width = layer.ffn_size / cut
    router = s.share * (chosen * (2 * INT64 + FLOAT32) + s.arch.experts.count * (FLOAT32 + 1))
    widths = 3 if s.kind == "local" else 3 - again
    own = routed * ((s.arch.hidden_size + width) * s.input + widths * width * s.dtype + FLOAT32)
    return router + own + _gated(s, s.arch.experts.shared_width)


def _gated(s: Shapes, ffn: int) -> float:
    """Bytes between the products of a dense or shared MLP of that width."""
    is_composed = s.kind == "local" and FAMILIES[s.arch.family].activation != "silu"
    between = 3 if is_composed else 2  # gate, up; composed: the activation of gate too
    return s.local * ffn / s.layout.tensor * (s.dtype * between + s.input)


def _head(s: Shapes, role: Role) -> float:
    """Bytes of the final norm and the head, which sees the rows that predict response tokens."""
    rows = s.tokens.response / s.layout.context
    width = FLOAT32 if role == "critic" else s.dtype
    vectors = INT64 if role == "critic" else 2 * INT64 + 2 * FLOAT32
    return s.norm(s.arch.hidden_size, s.share) + rows * (s.arch.hidden_size * width + vectors)


def in_flight(layout: ParallelConfig, stage: int, micro_batches: int) -> int:
    """Returns the largest number of chunk forward passes that a stage holds at once: 1F1B, or its interleaved form."""
    chunks, ahead = layout.virtual_pipeline or 1, layout.pipeline - stage - 1
    if chunks == 1:
        return min(micro_batches, ahead + 1)
    return min(micro_batches * chunks, 2 * ahead + (chunks - 1) * layout.pipeline + 1)
