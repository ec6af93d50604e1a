"""Inputs and outcomes of scoring: plain values, which are sent to worker processes and over HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np  # workers do without

    from mrl.core import Sample


@dataclass(frozen=True)
class ScoreRequest:
    """One response to score. prompt: text; for a list of chat messages the last one's content (the row holds all)."""

    prompt: str
    response: str
    row: dict[str, Any]
    response_tokens: int = 0
    sample: Sample | None = field(default=None, compare=False, repr=False)  # for models; functions do not get it
    image: np.ndarray | None = field(default=None, compare=False)  # [channels, height, width] uint8, in place of text
    pictures: tuple[bytes, ...] | None = None  # images of the prompt, as PNG; None: not requested

    @property
    def token_ids(self) -> list[int]:
        """Token ids of prompt and response for a text-only model, with one image token an image."""
        sample = self.sample
        return [] if sample is None else [*sample.request.prompt.text_token_ids, *sample.response_ids.tolist()]


@dataclass(frozen=True)
class Outcome:
    """A component's score, and further values that its function returned."""

    score: float
    parts: dict[str, float] = field(default_factory=dict)
