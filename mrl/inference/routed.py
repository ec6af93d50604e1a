"""Routed experts that an engine returns with a sample."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

from mrl.families import ExpertArch, ModelArch
from mrl.inference.answers import field, shown
from mrl.inference.errors import BadAnswer

ASK = "--enable-return-routed-experts"  # of SGLang's command line


@dataclass(frozen=True)
class RoutedShape:
    """Shape of the routed experts of a model whose tokens go to `per_token` of `count` experts in those `layers` of
    `num_layers` that have any."""

    layers: tuple[int, ...]
    num_layers: int
    per_token: int
    count: int

    @classmethod
    def of(cls, arch: ModelArch) -> RoutedShape:
        """Raises ValueError for a model without experts."""
        if arch.experts is None:
            raise ValueError(f"{arch.family}: the model has no experts")
        layers = tuple(i for i, layer in enumerate(arch.layers) if layer.experts)
        return cls(layers, arch.num_layers, arch.experts.per_token, arch.experts.count)

    @property
    def token_bytes(self) -> int:
        """Bytes of an answer for each token: base64 of int32."""
        return -(-self.num_layers * self.per_token * 16 // 3)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type of an expert's number."""
        return np.dtype(ExpertArch(self.count, self.per_token).number)

    def read(self, meta: dict[str, Any], tokens: int, start: int = 0) -> np.ndarray:
        """[tokens - start, layers with experts, experts a token] of a sample of so many tokens, prompt and response,
        of which the engine was not asked about the first `start`; zeros for the last one, which went nowhere. Raises
        BadAnswer for what is missing or cannot be."""
        if meta.get("routed_experts") is None:
            raise BadAnswer(f"routed_experts is missing: the engine must be started with {ASK}")
        text = field(meta, "routed_experts", str)
        try:
            flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
        except ValueError as error:
            raise BadAnswer(f"routed_experts is {shown(text)}, expected base64 of int32 numbers") from error
        count = tokens - start
        if flat.size != (count - 1) * self.num_layers * self.per_token:
            wanted = f"{count} - 1 tokens x {self.num_layers} layers x {self.per_token} experts"
            raise BadAnswer(f"routed_experts has {flat.size} numbers, expected {wanted}")
        every = flat.reshape(count - 1, self.num_layers, self.per_token)[:, list(self.layers)]
        if every.size and not 0 <= every.min() <= every.max() < self.count:
            raise BadAnswer(f"routed_experts names experts {every.min()} to {every.max()}, the model has {self.count}")
        ordered = np.sort(every, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise BadAnswer("routed_experts sends a token to the same expert twice")
        found = np.zeros((count, len(self.layers), self.per_token), self.dtype)
        found[:-1] = every
        return found

    def written(self, chosen: np.ndarray) -> str:
        """Returns the text that `read` reads, of the experts [tokens - start - 1, layers with experts, experts a
        token]."""
        every = np.zeros((len(chosen), self.num_layers, self.per_token), "<i4")
        every[:, list(self.layers)] = chosen
        return base64.b64encode(every.tobytes()).decode()


def joined(known: np.ndarray | None, drawn: np.ndarray | None) -> np.ndarray | None:
    """[tokens so far - 1, layers with experts, experts a token]: those of a request and of the one after it, which
    begins with its tokens and was asked from `len(known)` on. A token keeps the experts it first went to, by which what
    follows it was drawn. drawn: as in `Sample`, None where nobody asks."""
    if drawn is None:
        return None
    return drawn[:-1] if known is None else np.concatenate([known, drawn[:-1]])


def whole(known: np.ndarray) -> np.ndarray:
    """Returns the experts with a row for the last token, as in `Sample`."""
    return np.concatenate([known, np.zeros_like(known[:1])])
