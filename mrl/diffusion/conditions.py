"""What a net is told of its prompts: classes, or what text encoders make of words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mrl import platform
from mrl.config.checks.diffusion import NETS, blank_label
from mrl.diffusion.text import ENCODINGS

Told = dict[str, Tensor]  # [n, ...] each, by the net's arguments


@dataclass(frozen=True)
class PromptRow:
    """One row of the data. text: its prompt; label: its class, where rows have one; row: all of it, for the reward."""

    text: str
    label: int | None
    row: dict[str, Any]


class Conditions(Protocol):
    def encode(self, prompts: Sequence[PromptRow]) -> Told:
        """Of n prompts, on the device."""

    def blank(self, count: int) -> Told:
        """The same for no prompt (or the negative one), which guidance leads away from."""


def take(told: Told, rows: Tensor | slice) -> Told:
    """Some of the rows."""
    return {name: values[rows.to(values.device) if isinstance(rows, Tensor) else rows] for name, values in told.items()}


def joined(first: Told, second: Told) -> Told:
    """The rows of both."""
    return {name: torch.cat([values, second[name]]) for name, values in first.items()}


def where(chosen: Tensor, first: Told, second: Told) -> Told:
    """The rows of `first` where `chosen` [n], of `second` elsewhere."""
    return {
        name: torch.where(chosen.view(-1, *(1,) * (values.dim() - 1)), values, second[name])
        for name, values in first.items()
    }


def conditions_of(path: Path, name: str, config: dict[str, Any], negative: str, dtype: torch.dtype) -> Conditions:
    """Those of a net of this class and configuration, in a diffusers directory. Raises OSError or ValueError."""
    kind = NETS[name]
    if kind.told == "labels":
        return Labels(blank_label(name, config))
    return Text(ENCODINGS[kind.told](path, config, dtype), negative)


class Labels:
    """blank_label: that of no class; None: the net is told nothing at all."""

    def __init__(self, blank_label: int | None) -> None:
        self._blank = blank_label

    def encode(self, prompts: Sequence[PromptRow]) -> Told:
        """Raises ValueError for a row without a class, or with one that the net does not have."""
        if self._blank is None:
            return {}
        for prompt in prompts:
            if prompt.label is None or not 0 <= prompt.label < self._blank:
                raise ValueError(f"prompt {prompt.text!r}: class {prompt.label}, the net has 0 to {self._blank - 1}")
        return {"class_labels": torch.tensor([prompt.label for prompt in prompts], device=platform.device())}

    def blank(self, count: int) -> Told:
        if self._blank is None:
            return {}
        return {"class_labels": torch.full((count,), self._blank, device=platform.device())}


class Text:
    """encode_texts: what one kind of net is told of texts; nothing of it is trained"""

    def __init__(self, encode_texts: Callable[[list[str]], Told], negative: str) -> None:
        self._encode_texts = encode_texts
        self._negative = self._encode_texts([negative])

    def encode(self, prompts: Sequence[PromptRow]) -> Told:
        """Prompts longer than an encoder's longest are cut."""
        texts = list(dict.fromkeys(prompt.text for prompt in prompts))
        places = {text: i for i, text in enumerate(texts)}
        return take(self._encode_texts(texts), torch.tensor([places[prompt.text] for prompt in prompts]))

    def blank(self, count: int) -> Told:
        return {name: values.expand(count, *values.shape[1:]) for name, values in self._negative.items()}
