"""Shape of a model: everything in mrl that depends on a model's shape reads this, never its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from mrl.families.keys import UnsupportedModel

_HEAD = {"score_heads": 1, "scores_steps": False}
_USUAL = {**_HEAD, "rotary_dim": None, "attention_scale": None}  # recorded only if different


@dataclass(frozen=True)
class LayerArch:
    """Decoder layer, by the properties that differ between layers: a gated MLP of width `ffn_size`, or experts of that
    width.

    window: attention window in tokens, including the token itself; None: unlimited
    rope: the table of rotary angles in config.json; "": the only one; None: no rotation
    delta: a gated delta net in place of attention
    """

    ffn_size: int
    experts: bool = False
    window: int | None = None
    rope: str | None = ""
    delta: bool = False

    @property
    def shape(self) -> tuple[int, bool, bool]:
        """Key that determines the names and shapes of the layer's weights."""
        return self.ffn_size, self.experts, self.delta


@dataclass(frozen=True)
class ExpertArch:
    """Properties shared by all expert layers of a model.

    normalize_topk: the chosen experts' weights are scaled to add up to 1
    sigmoid: each expert is scored by itself, not by a softmax over all; a frozen bias per expert takes part in the
    choice scale: final factor of the weights
    groups, per_token_groups: number of expert groups, and of those that a token's experts come from
    shared_width: of an MLP that every token passes beside its experts; 0: none
    shared_gate: that MLP's output is multiplied by a sigmoid gate per token
    """

    count: int
    per_token: int
    normalize_topk: bool = True
    sigmoid: bool = False
    scale: float = 1.0
    groups: int = 1
    per_token_groups: int = 1
    shared_width: int = 0
    shared_gate: bool = False

    @property
    def number(self) -> Literal["uint8", "int16"]:
        """Smallest dtype for an expert's number that NumPy and torch share."""
        return "uint8" if self.count <= 256 else "int16"

    @property
    def number_bytes(self) -> int:
        return 1 if self.number == "uint8" else 2

    def record(self) -> dict[str, Any]:
        """Returns the checkpoint's record: fields with unusual values, except the first three."""
        usual = ExpertArch(self.count, self.per_token, self.normalize_topk)
        return {name: value for name, value in vars(self).items() if value != vars(usual)[name]}


@dataclass(frozen=True)
class LatentAttentionArch:
    """Multi-head latent attention: keys and values derived from a small vector a token (MLA, arXiv 2405.04434).

    query_rank: size of the queries' latent vector; None: queries come from the hidden state
    rank: size of the keys' and values' vector; plain, turned: unrotated and rotated channels of a query or key head,
    the rotated ones shared by all heads' keys; value: channels of a value head
    """

    query_rank: int | None
    rank: int
    plain: int
    turned: int
    value: int


@dataclass(frozen=True)
class DeltaNetArch:
    """Gated delta nets (arXiv 2412.06464): linear attention whose state forgets, and corrects what it holds of a key.

    key_heads, value_heads: several value heads may share a key head; key, value: channels of such a head
    kernel: tokens that the convolution before it sees
    """

    key_heads: int
    value_heads: int
    key: int
    value: int
    kernel: int

    @property
    def rows(self) -> tuple[int, int, int, int, int, int]:
        """Rows of the input projection: queries, keys, values, output gates, write strengths and decays."""
        keys, values = self.key_heads * self.key, self.value_heads * self.value
        return keys, keys, values, values, self.value_heads, self.value_heads


@dataclass(frozen=True)
class VisionArch:
    """Vision tower, and how its features enter the decoder.

    image_token: the id that stands for a feature; axes: the position axis (0 text, 1 row, 2 column) of each of the
    head_dim / 2 rotary frequencies
    depth, width, ffn_size: of the tower; patch: pixels of a side; merge: patches of a side that become one feature
    positions: size of its table of learned positions, 0: none
    deep: tower layers whose features are added after the decoder's first layers, in order
    gated: its MLPs have a gate
    window: patches of an attention window, used by all but `whole_layers` of its layers, 0: none
    """

    image_token: int
    axes: tuple[int, ...]
    depth: int
    width: int
    ffn_size: int
    out_width: int
    channels: int
    temporal: int
    patch: int
    merge: int
    positions: int = 0
    deep: tuple[int, ...] = ()
    gated: bool = False
    window: int = 0
    whole_layers: int = 0

    @property
    def patch_values(self) -> int:
        """Number of input values of a patch."""
        return self.channels * self.temporal * self.patch**2

    @property
    def unit(self) -> int:
        """Side in pixels of the square that becomes one token."""
        return self.patch * self.merge

    def record(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


@dataclass(frozen=True)
class ModelArch:
    """Shape of a decoder-only model. Layers may differ in their feed-forward part and in their attention window.

    Raises UnsupportedModel where Megatron-Core has one number for a property that differs between layers.
    """

    family: str  # the key of `mrl.families.FAMILIES`
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerArch, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_positions: int
    initializer_range: float
    eos_token_ids: tuple[int, ...]
    experts: ExpertArch | None = None
    score_heads: int = 1  # outputs of the head that a critic or reward model has in place of the output layer
    scores_steps: bool = False  # the head scores the ends of steps, not the whole text
    latent: LatentAttentionArch | None = None  # of models with latent attention
    vision: VisionArch | None = None  # of models with image inputs
    delta: DeltaNetArch | None = None  # of models with gated delta nets
    rotary_dim: int | None = None  # number of rotated channels, a head's first; None: all
    attention_scale: float | None = None  # scale of the attention scores; None: head_dim ** -0.5

    def __post_init__(self) -> None:
        if any(layer.experts for layer in self.layers) != (self.experts is not None):
            raise UnsupportedModel(f"{self.family}: either expert layers or the number of experts is missing")
        widths = {(layer.ffn_size, layer.experts) for layer in self.layers}
        if len(widths) > len({experts for _, experts in widths}):
            raise UnsupportedModel(f"{self.family}: layers of one kind have different widths, which is not supported")

    def with_head_of(self, record: Mapping[str, Any]) -> ModelArch:
        """Returns this model with the score head of another model's `record`."""
        return replace(self, **{name: record.get(name, usual) for name, usual in _HEAD.items()})

    def record(self) -> dict[str, Any]:
        """Returns the checkpoint's record of its model, as JSON values: the fields, with layers as two numbers (one by
        one where they differ).
        """
        apart = ("layers", "experts", "vision", "latent", "delta", *_USUAL)
        fields = {name: value for name, value in vars(self).items() if name not in apart}
        fields |= {name: vars(self)[name] for name, usual in _USUAL.items() if vars(self)[name] != usual}
        experts = self.experts
        unusual = experts.record() if experts else {}
        unturned = [index for index, layer in enumerate(self.layers) if layer.rope is None]
        deltas = [index for index, layer in enumerate(self.layers) if layer.delta]
        return fields | {
            "num_layers": self.num_layers,
            "ffn_size": self.layers[0].ffn_size,
            "num_experts": experts.count if experts else None,
            "experts_per_token": experts.per_token if experts else None,
            "normalize_topk": experts.normalize_topk if experts else True,
            **({"latent": vars(self.latent)} if self.latent else {}),
            **({"vision": self.vision.record()} if self.vision else {}),
            **({"delta": {**vars(self.delta), "layers": deltas}} if self.delta else {}),
            **({"experts": unusual} if unusual else {}),
            **({"layers": [[layer.ffn_size, layer.experts] for layer in self.layers]} if self.layers_differ else {}),
            **({"windows": [layer.window for layer in self.layers]} if self.windows else {}),
            **({"unturned": unturned} if unturned else {}),
        }

    @property
    def layers_differ(self) -> bool:
        """True if layers differ in the shapes of their weights."""
        return len({layer.shape for layer in self.layers}) > 1

    @property
    def windows(self) -> set[int]:
        """Attention windows of its layers."""
        return {layer.window for layer in self.layers if layer.window is not None}

    @property
    def rope_tables(self) -> tuple[str, ...]:
        """Tables of rotary angles that its layers use."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def rotary_width(self) -> int:
        """Rotated channels of a head."""
        return self.rotary_dim or self.head_dim

    @property
    def value_dim(self) -> int:
        """Channels of a value head."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def cached_width(self) -> tuple[int, int]:
        """(numbers a token and layer in an engine's KV cache independent of heads, numbers per key head)."""
        return (self.latent.rank + self.latent.turned, 0) if self.latent else (0, 2 * self.head_dim)

    @property
    def choice_bytes(self) -> int:
        """Bytes of a token's expert numbers in all MoE layers; 0 without experts."""
        if self.experts is None:
            return 0
        return sum(layer.experts for layer in self.layers) * self.experts.per_token * self.experts.number_bytes

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dense_width(self) -> int | None:
        """MLP width of the dense layers; None without any."""
        return next((layer.ffn_size for layer in self.layers if not layer.experts), None)

    @property
    def shared_width(self) -> int | None:
        """Width of the shared expert MLP; None without one."""
        return (self.experts.shared_width or None) if self.experts else None

    @property
    def expert_width(self) -> int | None:
        """MLP width of one expert; None without any."""
        return next((layer.ffn_size for layer in self.layers if layer.experts), None)
