"""Image processor of a vision-language model: image sizes, image tokens, and the pixel values for the vision tower."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mrl.config.problems import shortened
from mrl.config.schema import DataConfig
from mrl.data.errors import DataError
from mrl.data.images import ImageError, SizeBounds, png, read_image, size_of
from mrl.data.rows import value_at
from mrl.data.tokenizer import Tokenizer
from mrl.families import VisionArch

PAD = "<|image_pad|>"
NORMALISATION = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
Grid = tuple[int, int]  # rows and columns of patches


@dataclass(frozen=True)
class ProcessedImage:
    """An image as the engine receives it. digest: checksum of its pixels, for ranks that decode it again"""

    png: bytes
    grid: Grid
    digest: int


class ImageProcessor:
    """Image processor of the model at `path`.

    Raises DataError if the processor's patch sizes differ from the vision tower's, or `data.max_image_tokens` is below
    the processor's minimum.
    """

    def __init__(self, path: str | Path, vision: VisionArch, cfg: DataConfig) -> None:
        from transformers import AutoImageProcessor

        self.vision, self.cfg = vision, cfg
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(
                str(path), backend="pil", local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # a library reads a foreign file
            reason = shortened(" ".join(str(error).split()), most=300)
            raise DataError(f"{path}: its image processor cannot be loaded: {reason}") from error
        found = {name: vars(self._processor).get(name) for name in ("patch_size", "merge_size", "temporal_patch_size")}
        wanted = {"patch_size": vision.patch, "merge_size": vision.merge, "temporal_patch_size": vision.temporal}
        if found != wanted:
            raise DataError(f"{path}: preprocessor_config.json has {found}, and config.json's vision tower {wanted}")
        size = self._processor.size
        low, high = int(size["shortest_edge"]), int(size["longest_edge"])
        most = min(high, cfg.max_image_tokens * vision.unit**2)
        if most < low:
            message = f"data.max_image_tokens={cfg.max_image_tokens}: must be at least "
            raise DataError(message + f"{-(-low // vision.unit**2)}, the minimum of the model's image processor")
        self.bounds = SizeBounds(vision.unit, low, most)

    @property
    def normalisation(self) -> dict[str, Any]:
        """Pixel normalisation, by the keys of preprocessor_config.json."""
        return {name: vars(self._processor).get(name) for name in NORMALISATION}

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises DataError if the tokenizer's image token is not the model's."""
        if tokenizer.hf.convert_tokens_to_ids(PAD) != self.vision.image_token:
            raise DataError(f"the tokenizer's {PAD} is not config.json's image_token_id {self.vision.image_token}")

    def values(self, row: dict[str, Any]) -> list[Any]:
        """Returns the row's images as stored; an empty list if it has none. Raises ImageError for too many."""
        found = value_at(row, self.cfg.images_key)
        values = [] if found is None else found if isinstance(found, list) else [found]
        if len(values) > self.cfg.max_images:
            raise ImageError(f"{len(values)} images, more than data.max_images={self.cfg.max_images}")
        return values

    def grids(self, row: dict[str, Any], root: Path) -> tuple[Grid, ...]:
        """Returns the patch grid of each image, read from its header. Raises ImageError, which names the image."""
        return tuple(self._each(row, lambda value: self._grid(self.bounds.fit(*size_of(value, root)))))

    def pictures(self, row: dict[str, Any], root: Path) -> tuple[ProcessedImage, ...]:
        """Returns the row's images, decoded and resized. Raises ImageError, which names the image."""

        def read(value: Any) -> ProcessedImage:
            image = read_image(value, root, self.bounds)
            return ProcessedImage(png(image), self._grid(image.size), digest(image))

        return tuple(self._each(row, read))

    def image(self, row: dict[str, Any], root: Path, number: int) -> Image.Image:
        """Returns one image of the row as the model sees it. Raises ImageError."""
        return read_image(self.values(row)[number], root, self.bounds)

    def pixels(self, image: Image.Image) -> Tensor:
        """Returns the pixel values of an image that is already resized, [patches, patch values] float32. Raises
        ImageError if the model's processor would resize it again.
        """
        found = self._processor(images=[image], return_tensors="pt")
        rows, columns = self._grid(image.size)
        if found["image_grid_thw"].tolist() != [[1, rows, columns]]:
            raise ImageError(f"the model's image processor resizes {image.width} x {image.height} pixels again")
        values: Tensor = found["pixel_values"].to(torch.float32)
        return values

    def tokens(self, grid: Grid) -> int:
        """Returns the number of tokens that an image takes."""
        return grid[0] * grid[1] // self.vision.merge**2

    def expand_image_tokens(self, ids: list[int], grids: tuple[Grid, ...]) -> list[int]:
        """Returns ids with each image token repeated once a feature of its image. Raises ValueError if the number of
        image tokens is not the number of images: a text may contain one.
        """
        token = self.vision.image_token
        if (found := ids.count(token)) != len(grids):
            raise ValueError(f"the prompt has {found} image tokens ({PAD}), and the row {len(grids)} images")
        sizes = iter(grids)
        return [each for i in ids for each in ([token] * self.tokens(next(sizes)) if i == token else [i])]

    def collapse_image_tokens(self, ids: list[int], grids: tuple[Grid, ...]) -> list[int]:
        """Inverts `expand_image_tokens`."""
        found: list[int] = []
        sizes, place = iter(grids), 0
        while place < len(ids):
            found.append(ids[place])
            place += self.tokens(next(sizes)) if ids[place] == self.vision.image_token else 1
        return found

    def _grid(self, size: tuple[int, int]) -> Grid:
        return size[1] // self.vision.patch, size[0] // self.vision.patch

    def _each(self, row: dict[str, Any], read: Any) -> list[Any]:
        found = []
        for number, value in enumerate(self.values(row)):
            try:
                found.append(read(value))
            except ImageError as error:
                raise ImageError(f"image {number}: {error}") from error
        return found


def digest(image: Image.Image) -> int:
    """Returns a 32-bit checksum of the pixels."""
    return zlib.crc32(image.tobytes())
