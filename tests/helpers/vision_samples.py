"""Samples with images for a tiny model, and the outputs of transformers for them, one sample at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from mrl.core import Rollout
from tests.helpers.tiny_vl import END, IMAGE, START

UNITS = [[(2, 3)], [(1, 1)], [(4, 2), (2, 2)], [], [(3, 3)], [(1, 4)]]  # rows and columns of each image's features
LAST = [1, 9, 5, 12, 3, 17]  # lengths of the responses


@dataclass(frozen=True)
class Seen:
    """A sample. prompt, response: token ids; inputs: pixel_values and image_grid_thw, empty without an image"""

    prompt: list[int]
    response: list[int]
    inputs: dict[str, Tensor]

    @property
    def grids(self) -> Tensor:
        none = torch.empty(0, 3, dtype=torch.int64)
        return self.inputs.get("image_grid_thw", none)[:, 1:]

    @property
    def images(self) -> Tensor:
        """Returns rows, columns and digest (7) of each image, as `Rollout.of` takes them."""
        return torch.nn.functional.pad(self.grids, (0, 1), value=7)


def make_seen(directory: Path | str, patch: int = 4, seed: int = 0) -> list[Seen]:
    """Returns samples without, with one and with two images. One response contains an image token."""
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    rng = np.random.default_rng(seed)
    made = []
    for units, length in zip(UNITS, LAST, strict=True):
        sides = [(rows * 2 * patch, columns * 2 * patch, 3) for rows, columns in units]
        pictures = [Image.fromarray(rng.integers(0, 256, side).astype("uint8")) for side in sides]
        inputs = dict(processor(images=pictures, return_tensors="pt")) if pictures else {}
        prompt = [1, *rng.integers(3, 259, 3).tolist()]
        for rows, columns in units:
            prompt += [START, *[IMAGE] * (rows * columns), END, *rng.integers(3, 259, 2).tolist()]
        response = rng.integers(3, 259, length).tolist()
        if length == 12:
            response[4] = IMAGE
        made.append(Seen(prompt, response, inputs))
    return made


def rollout_of(seen: list[Seen], per_row: int = 1) -> Rollout:
    """Returns a rollout. per_row: number of consecutive samples that share the images of one row"""
    return Rollout.of(
        0,
        [each.prompt for each in seen],
        [each.response for each in seen],
        group=torch.arange(len(seen)) // per_row,
        rows=torch.arange(len(seen)) // per_row + 100,
        image_counts=torch.tensor([len(each.grids) for each in seen]),
        images=torch.cat([each.images for each in seen]),
    )


def pixels_of(seen: list[Seen]) -> Any:
    """Returns the function [k, 5] -> pixels that a Learner calls."""

    def of(images: Tensor) -> Tensor:
        parts = []
        for row, number, rows, columns, _ in images.tolist():
            each = seen[row - 100]
            ends = [0, *each.grids.prod(1).cumsum(0).tolist()]
            assert each.grids[number].tolist() == [rows, columns]
            parts.append(each.inputs["pixel_values"][ends[number] : ends[number + 1]])
        return torch.cat(parts)

    return of


def load_reference(directory: Path | str) -> Any:
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)


def inputs_of(each: Seen) -> dict[str, Tensor]:
    ids = torch.tensor([each.prompt + each.response])
    kinds = (ids == IMAGE).int()
    kinds[:, len(each.prompt) :] = 0
    return {"input_ids": ids, "mm_token_type_ids": kinds, **each.inputs}


def log_probs(reference: Any, each: Seen, temperature: float = 1.0) -> Tensor:
    """Returns the log-probs of the response, [n]. transformers refuses image tokens without features, so those of the
    response are replaced by their embeddings."""
    return (
        _logits(reference, each).div(temperature).log_softmax(-1).gather(-1, torch.tensor(each.response)[:, None])[:, 0]
    )


def values(reference: Any, each: Seen, head: Tensor) -> Tensor:
    """Returns the values before each response token, [n], for the value head [1, h]."""
    return (_hidden(reference, each) @ head.T)[:, 0]


def pairs_of(seen: list[Seen]) -> list[Seen]:
    """Returns each sample followed by one with another response to the same prompt. Some of these responses are longer,
    and one contains an image token."""
    other = [replace(each, response=[*each.response[::-1], *each.prompt[1:3]][i % 2 :]) for i, each in enumerate(seen)]
    return [each for pair in zip(seen, other, strict=True) for each in pair]


def score(reference: Any, each: Seen, head: Tensor) -> Tensor:
    """Returns the scores at the last token, [heads]."""
    return _hidden(reference, replace(each, response=[*each.response, 3]))[-1] @ head.T


def _logits(reference: Any, each: Seen) -> Tensor:
    return _hidden(reference, each) @ reference.lm_head.weight.T


def _hidden(reference: Any, each: Seen) -> Tensor:
    inputs, config = inputs_of(each), reference.config
    said = (inputs["input_ids"] == IMAGE) & (inputs["mm_token_type_ids"] == 0)
    if said.any():  # use another id and give it the embedding of the image token
        inputs["input_ids"] = inputs["input_ids"].masked_fill(said, config.text_config.vocab_size - 1)
        table = reference.get_input_embeddings().weight
        handle = reference.get_input_embeddings().register_forward_hook(
            lambda module, args, out: torch.where(
                (args[0] == config.text_config.vocab_size - 1)[..., None], table[IMAGE], out
            )
        )
    try:
        out = reference.model(**inputs).last_hidden_state[0]
    finally:
        if said.any():
            handle.remove()
    return out[len(each.prompt) - 1 : -1]
