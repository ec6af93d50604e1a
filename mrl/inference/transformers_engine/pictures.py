"""Pictures of a request: what the model's processor makes of them, and the prompt with a token for each feature."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mrl.families import VisionArch

HEAD = "data:image/png;base64,"
KEPT = 16  # prompts


@dataclass(frozen=True)
class Inputs:
    """pixels [patches, patch values]; grids [pictures, 3]"""

    pixels: Tensor
    grids: Tensor


class Sight:
    """Image processing of the model at `path`."""

    def __init__(self, path: str, vision: VisionArch) -> None:
        from transformers import AutoImageProcessor

        self.vision = vision
        self._inputs = lru_cache(maxsize=KEPT)(self._of)  # several samples of a prompt have the same
        self._processor: Any = AutoImageProcessor.from_pretrained(
            path, backend="pil", trust_remote_code=False, local_files_only=True
        )

    def read(self, ids: list[int], urls: list[str]) -> tuple[list[int], Inputs | None]:
        """(the prompt, what its pictures are to the model). Raises ValueError for a request that does not have one
        image token for each picture, or for anything else than PNG in itself."""
        if ids.count(self.vision.image_token) != len(urls):
            raise ValueError(f"{ids.count(self.vision.image_token)} image tokens, {len(urls)} pictures")
        if not urls:
            return ids, None
        inputs = self._inputs(tuple(urls))
        counts = iter((inputs.grids.prod(1) // self.vision.merge**2).tolist())
        token = self.vision.image_token
        expanded = [each for i in ids for each in ([token] * next(counts) if i == token else [i])]
        return expanded, inputs

    def _of(self, urls: tuple[str, ...]) -> Inputs:
        found = self._processor(images=[_picture(url) for url in urls], return_tensors="pt")
        return Inputs(found["pixel_values"], found["image_grid_thw"])

    def model_inputs(self, ids: Tensor, mask: Tensor, inputs: list[Inputs | None]) -> dict[str, Tensor]:
        """Returns the inputs of `generate` beside ids [rows, width] and their mask."""
        seen = [each for each in inputs if each is not None]
        if not seen:
            return {}
        return {
            "mm_token_type_ids": ((ids == self.vision.image_token) & (mask == 1)).int(),
            "pixel_values": torch.cat([each.pixels for each in seen]),
            "image_grid_thw": torch.cat([each.grids for each in seen]),
        }


def _picture(url: str) -> Any:
    from PIL import Image

    if not url.startswith(HEAD):
        raise ValueError(f"a picture must begin with {HEAD}")
    try:
        image = Image.open(io.BytesIO(base64.b64decode(url.removeprefix(HEAD), validate=True)), formats=["PNG"])
        image.load()
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"no PNG: {error}") from error
    return image
