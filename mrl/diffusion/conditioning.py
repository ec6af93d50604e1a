"""Conditioning inputs of a net: class labels, or text encodings of prompts."""

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

ConditioningInputs = dict[str, Tensor]  # [n, ...] each, by the net's arguments


@dataclass(frozen=True)
class PromptRow:
    """One row of the data. text: prompt; label: class, if rows have one; row: the whole row, for the reward."""

    text: str
    label: int | None
    row: dict[str, Any]


class Conditioning(Protocol):
    def encode(self, prompts: Sequence[PromptRow]) -> ConditioningInputs:
        """Returns the conditioning of n prompts, on the device."""

    def blank(self, count: int) -> ConditioningInputs:
        """Returns the conditioning of the empty (or negative) prompt, for classifier-free guidance."""


def take_rows(conditioning: ConditioningInputs, rows: Tensor | slice) -> ConditioningInputs:
    """Returns some of the rows."""
    return {
        name: values[rows.to(values.device) if isinstance(rows, Tensor) else rows]
        for name, values in conditioning.items()
    }


def concatenate(first: ConditioningInputs, second: ConditioningInputs) -> ConditioningInputs:
    """Concatenates the rows of both."""
    return {name: torch.cat([values, second[name]]) for name, values in first.items()}


def where(chosen: Tensor, first: ConditioningInputs, second: ConditioningInputs) -> ConditioningInputs:
    """Returns the rows of `first` where `chosen` [n] is true, those of `second` elsewhere."""
    return {
        name: torch.where(chosen.view(-1, *(1,) * (values.dim() - 1)), values, second[name])
        for name, values in first.items()
    }


def conditioning_of(path: Path, name: str, config: dict[str, Any], negative: str, dtype: torch.dtype) -> Conditioning:
    """Returns the conditions of a net of this class and configuration in a diffusers directory.

    Raises OSError or ValueError.
    """
    kind = NETS[name]
    if kind.told == "labels":
        return LabelConditioning(blank_label(name, config))
    return TextConditioning(ENCODINGS[kind.told](path, config, dtype), negative)


class LabelConditioning:
    """Class labels as conditioning. blank_label: the label of no class; None: the net is unconditional."""

    def __init__(self, blank_label: int | None) -> None:
        self._blank = blank_label

    def encode(self, prompts: Sequence[PromptRow]) -> ConditioningInputs:
        """Returns the labels. Raises ValueError for a row without a class, or with a class that the net lacks."""
        if self._blank is None:
            return {}
        for prompt in prompts:
            if prompt.label is None or not 0 <= prompt.label < self._blank:
                raise ValueError(f"prompt {prompt.text!r}: class {prompt.label} is not in 0 to {self._blank - 1}")
        return {"class_labels": torch.tensor([prompt.label for prompt in prompts], device=platform.device())}

    def blank(self, count: int) -> ConditioningInputs:
        if self._blank is None:
            return {}
        return {"class_labels": torch.full((count,), self._blank, device=platform.device())}


class TextConditioning:
    """Text conditioning by frozen encoders. encode_texts: encodes texts for one kind of net"""

    def __init__(self, encode_texts: Callable[[list[str]], ConditioningInputs], negative: str) -> None:
        self._encode_texts = encode_texts
        self._negative = self._encode_texts([negative])

    def encode(self, prompts: Sequence[PromptRow]) -> ConditioningInputs:
        """Returns the encodings; prompts longer than an encoder's limit are cut."""
        texts = list(dict.fromkeys(prompt.text for prompt in prompts))
        places = {text: i for i, text in enumerate(texts)}
        return take_rows(self._encode_texts(texts), torch.tensor([places[prompt.text] for prompt in prompts]))

    def blank(self, count: int) -> ConditioningInputs:
        return {name: values.expand(count, *values.shape[1:]) for name, values in self._negative.items()}
