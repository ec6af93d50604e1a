"""What a model is: everything in mrl that depends on a model's shape reads this, never its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mrl.families.keys import UnsupportedModel


@dataclass(frozen=True)
class Layer:
    """The feed-forward part of one decoder layer: a gated MLP of width `ffn_size`, or experts of that width each."""

    ffn_size: int
    experts: bool = False


@dataclass(frozen=True)
class Experts:
    """What all expert layers of a model share. `normalize_topk`: the chosen experts' weights are scaled to add up to
    1."""

    count: int
    per_token: int
    normalize_topk: bool = True


@dataclass(frozen=True)
class ModelArch:
    """The shape of a decoder-only model. Layers may differ in their feed-forward part; attention is alike in all.

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

    def __post_init__(self) -> None:
        if any(layer.experts for layer in self.layers) != (self.experts is not None):
            raise UnsupportedModel(f"{self.family}: expert layers and the number of experts come together")
        if len(set(self.layers)) > len({layer.experts for layer in self.layers}):
            raise UnsupportedModel(f"{self.family}: layers of one kind have several widths; supported: one")

    def record(self) -> dict[str, Any]:
        """What a checkpoint says of its model, in values that JSON keeps: the fields, the layers in two numbers (one by
        one where they differ)."""
        fields = {name: value for name, value in vars(self).items() if name not in ("layers", "experts")}
        experts = self.experts
        return fields | {
            "num_layers": self.num_layers,
            "ffn_size": self.layers[0].ffn_size,
            "num_experts": experts.count if experts else None,
            "experts_per_token": experts.per_token if experts else None,
            "normalize_topk": experts.normalize_topk if experts else True,
            **({"layers": [[layer.ffn_size, layer.experts] for layer in self.layers]} if self.layers_differ else {}),
        }

    @property
    def layers_differ(self) -> bool:
        return len(set(self.layers)) > 1

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dense_width(self) -> int | None:
        """Of the dense layers' MLP; None where there are none."""
        return next((layer.ffn_size for layer in self.layers if not layer.experts), None)

    @property
    def expert_width(self) -> int | None:
        """Of one expert's MLP; None where there are none."""
        return next((layer.ffn_size for layer in self.layers if layer.experts), None)
