"""What a model is: everything in mrl that depends on a model's shape reads this, never its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from mrl.families.keys import UnsupportedModel

_HEAD = {"score_heads": 1, "scores_steps": False}
_USUAL = {**_HEAD, "rotary_dim": None, "attention_scale": None}  # said only where they are other than these


@dataclass(frozen=True)
class Layer:
    """One decoder layer, in what layers of a model may differ: a gated MLP of width `ffn_size`, or experts of that
    width each.

    window: how many tokens one looks at, itself and those before it; None: all of them
    rope: which of config.json's tables of rotary angles turns its heads; "": the only one; None: none does
    """

    ffn_size: int
    experts: bool = False
    window: int | None = None
    rope: str | None = ""

    @property
    def shape(self) -> tuple[int, bool]:
        """What decides the names and shapes of its weights."""
        return self.ffn_size, self.experts


@dataclass(frozen=True)
class Experts:
    """What all expert layers of a model share.

    normalize_topk: the chosen experts' weights are scaled to add up to 1
    sigmoid: each expert is scored by itself, not by a softmax over all; a frozen bias an expert helps to choose
    scale: what the weights are multiplied by in the end
    groups, per_token_groups: the experts are in so many groups, and a token's are in so many of them
    shared_width: of an MLP that every token goes through beside its experts; 0: none
    shared_gate: what it gives is multiplied by the sigmoid of a number that a token has of its own
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
        """What the number of one is kept as: the smallest of all that NumPy and torch both have."""
        return "uint8" if self.count <= 256 else "int16"

    @property
    def number_bytes(self) -> int:
        return 1 if self.number == "uint8" else 2

    def record(self) -> dict[str, Any]:
        """What a checkpoint says of them, but for the first three: what is other than usual."""
        usual = Experts(self.count, self.per_token, self.normalize_topk)
        return {name: value for name, value in vars(self).items() if value != vars(usual)[name]}


@dataclass(frozen=True)
class Latent:
    """Attention whose keys and values are made of a small vector a token (MLA, arXiv 2405.04434).

    query_rank: of the vector that queries are made of; None: they are made of the hidden state
    rank: of that of keys and values; plain, turned: channels of a query or key head that do not and do turn with the
    position, the latter one for all heads' keys; value: channels of a value head
    """

    query_rank: int | None
    rank: int
    plain: int
    turned: int
    value: int


@dataclass(frozen=True)
class VisionArch:
    """A tower that makes features of pictures, and how they enter the decoder.

    image_token: the id that stands for a feature; axes: by which of a token's three positions (0 text, 1 row, 2 column)
    each of the head_dim / 2 rotary frequencies turns
    depth, width, ffn_size: of the tower; patch: pixels of a side; merge: patches of a side that become one feature
    positions: of its table of learned positions, 0: none
    deep: layers of the tower whose features are added after as many of the decoder's first layers, in order
    gated: its MLPs have a gate
    window: patches of a window that all but `whole_layers` of its layers look within, 0: none
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
        """Numbers that the tower is given of a patch."""
        return self.channels * self.temporal * self.patch**2

    @property
    def unit(self) -> int:
        """Pixels of a side of what becomes one token."""
        return self.patch * self.merge

    def record(self) -> dict[str, Any]:
        """In values that JSON keeps."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


@dataclass(frozen=True)
class ModelArch:
    """The shape of a decoder-only model. Layers may differ in their feed-forward part, and in what attention sees.

    Raises UnsupportedModel where Megatron-Core has one number for what differs between layers.
    """

    family: str  # the key of `mrl.families.FAMILIES`
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
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
    experts: Experts | None = None
    score_heads: int = 1  # outputs of the head that a critic or reward model has in place of the output layer
    scores_steps: bool = False  # that head scores the ends of steps, not of the whole text
    latent: Latent | None = None  # of models whose attention has one
    vision: VisionArch | None = None  # of models that see pictures
    rotary_dim: int | None = None  # how many of a head's channels, the first, turn with the position; None: all
    attention_scale: float | None = None  # what queries times keys are multiplied by; None: head_dim ** -0.5

    def __post_init__(self) -> None:
        if any(layer.experts for layer in self.layers) != (self.experts is not None):
            raise UnsupportedModel(f"{self.family}: expert layers and the number of experts come together")
        shapes = {layer.shape for layer in self.layers}
        if len(shapes) > len({experts for _, experts in shapes}):
            raise UnsupportedModel(f"{self.family}: layers of one kind have several widths; supported: one")

    def with_head_of(self, record: Mapping[str, Any]) -> ModelArch:
        """This model with the score head that another's `record` tells."""
        return replace(self, **{name: record.get(name, usual) for name, usual in _HEAD.items()})

    def record(self) -> dict[str, Any]:
        """What a checkpoint says of its model, in values that JSON keeps: the fields, the layers in two numbers (one by
        one where they differ)."""
        apart = ("layers", "experts", "vision", "latent", *_USUAL)
        fields = {name: value for name, value in vars(self).items() if name not in apart}
        fields |= {name: vars(self)[name] for name, usual in _USUAL.items() if vars(self)[name] != usual}
        experts = self.experts
        unusual = experts.record() if experts else {}
        unturned = [index for index, layer in enumerate(self.layers) if layer.rope is None]
        return fields | {
            "num_layers": self.num_layers,
            "ffn_size": self.layers[0].ffn_size,
            "num_experts": experts.count if experts else None,
            "experts_per_token": experts.per_token if experts else None,
            "normalize_topk": experts.normalize_topk if experts else True,
            **({"latent": vars(self.latent)} if self.latent else {}),
            **({"vision": self.vision.record()} if self.vision else {}),
            **({"experts": unusual} if unusual else {}),
            **({"layers": [list(layer.shape) for layer in self.layers]} if self.layers_differ else {}),
            **({"windows": [layer.window for layer in self.layers]} if self.windows else {}),
            **({"unturned": unturned} if unturned else {}),
        }

    @property
    def layers_differ(self) -> bool:
        """Whether in the shapes of their weights."""
        return len({layer.shape for layer in self.layers}) > 1

    @property
    def windows(self) -> set[int]:
        """Those of its layers."""
        return {layer.window for layer in self.layers if layer.window is not None}

    @property
    def rope_tables(self) -> tuple[str, ...]:
        """The tables of rotary angles that its layers use."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def rotary_width(self) -> int:
        """Channels of a head that turn with the position."""
        return self.rotary_dim or self.head_dim

    @property
    def value_dim(self) -> int:
        """Channels of a value head."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def cached_width(self) -> tuple[int, int]:
        """(numbers a token and layer that an engine keeps whatever its heads are, those that it keeps a key head)."""
        return (self.latent.rank + self.latent.turned, 0) if self.latent else (0, 2 * self.head_dim)

    @property
    def choice_bytes(self) -> int:
        """Of the numbers of a token's experts, in all layers that have some; 0 without experts."""
        if self.experts is None:
            return 0
        return sum(layer.experts for layer in self.layers) * self.experts.per_token * self.experts.number_bytes

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dense_width(self) -> int | None:
        """Of the dense layers' MLP; None where there are none."""
        return next((layer.ffn_size for layer in self.layers if not layer.experts), None)

    @property
    def shared_width(self) -> int | None:
        """Of the MLP that every token of an expert layer goes through; None where there is none."""
        return (self.experts.shared_width or None) if self.experts else None

    @property
    def expert_width(self) -> int | None:
        """Of one expert's MLP; None where there are none."""
        return next((layer.ffn_size for layer in self.layers if layer.experts), None)
