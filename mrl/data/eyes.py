"""How a model sees the pictures of its rows: their sizes, their tokens, and the numbers that its tower is given."""

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
from mrl.data.pictures import Bounds, PictureError, png, read_picture, size_of
from mrl.data.rows import reached
from mrl.data.tokenizer import Tokenizer
from mrl.families import VisionArch

PAD = "<|image_pad|>"
NORMALISATION = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
Grid = tuple[int, int]  # rows and columns of patches


@dataclass(frozen=True)
class Picture:
    """One as an engine gets it. digest: of its pixels, for those that decode it again"""

    png: bytes
    grid: Grid
    digest: int


class Eyes:
    """Of the model at `path`. Raises DataError for a processor of another form than the tower's, or bounds that it
    would not keep to."""

    def __init__(self, path: str | Path, vision: VisionArch, cfg: DataConfig) -> None:
        from transformers import AutoImageProcessor

        self.vision, self.cfg = vision, cfg
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(
                str(path), backend="pil", local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # a library reads a foreign file
            reason = shortened(" ".join(str(error).split()), most=300)
            raise DataError(f"{path}: its processor of pictures cannot be loaded: {reason}") from error
        found = {name: vars(self._processor).get(name) for name in ("patch_size", "merge_size", "temporal_patch_size")}
        wanted = {"patch_size": vision.patch, "merge_size": vision.merge, "temporal_patch_size": vision.temporal}
        if found != wanted:
            raise DataError(f"{path}: preprocessor_config.json has {found}, the tower of config.json {wanted}")
        size = self._processor.size
        low, high = int(size["shortest_edge"]), int(size["longest_edge"])
        most = min(high, cfg.max_image_tokens * vision.unit**2)
        if most < low:
            message = f"data.max_image_tokens={cfg.max_image_tokens}: the model's processor makes at least "
            raise DataError(message + f"{-(-low // vision.unit**2)} tokens of a picture")
        self.bounds = Bounds(vision.unit, low, most)

    @property
    def normalisation(self) -> dict[str, Any]:
        """What makes numbers of pixels: by the keys of preprocessor_config.json."""
        return {name: vars(self._processor).get(name) for name in NORMALISATION}

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises DataError if it means something else by an image token."""
        if tokenizer.hf.convert_tokens_to_ids(PAD) != self.vision.image_token:
            raise DataError(f"the tokenizer's {PAD} is not config.json's image_token_id {self.vision.image_token}")

    def values(self, row: dict[str, Any]) -> list[Any]:
        """The row's pictures as they are stored; none where it has no such key. Raises PictureError for too many."""
        found = reached(row, self.cfg.images_key)
        values = [] if found is None else found if isinstance(found, list) else [found]
        if len(values) > self.cfg.max_images:
            raise PictureError(f"{len(values)} pictures, more than data.max_images={self.cfg.max_images}")
        return values

    def grids(self, row: dict[str, Any], root: Path) -> tuple[Grid, ...]:
        """Of each picture, from its header alone. Raises PictureError, which says which one."""
        return tuple(self._each(row, lambda value: self._grid(self.bounds.fit(*size_of(value, root)))))

    def pictures(self, row: dict[str, Any], root: Path) -> tuple[Picture, ...]:
        """Decoded and resized. Raises PictureError, which says which one."""

        def read(value: Any) -> Picture:
            image = read_picture(value, root, self.bounds)
            return Picture(png(image), self._grid(image.size), digest(image))

        return tuple(self._each(row, read))

    def image(self, row: dict[str, Any], root: Path, number: int) -> Image.Image:
        """One of them, as the model sees it. Raises PictureError."""
        return read_picture(self.values(row)[number], root, self.bounds)

    def pixels(self, image: Image.Image) -> Tensor:
        """[patches, patch values] float32 of a picture of the size that the model sees."""
        found = self._processor(images=[image], return_tensors="pt")
        rows, columns = self._grid(image.size)
        if found["image_grid_thw"].tolist() != [[1, rows, columns]]:
            raise PictureError(f"the model's processor resizes {image.width} x {image.height} pixels again")
        values: Tensor = found["pixel_values"].to(torch.float32)
        return values

    def tokens(self, grid: Grid) -> int:
        """That a picture takes."""
        return grid[0] * grid[1] // self.vision.merge**2

    def expanded(self, ids: list[int], grids: tuple[Grid, ...]) -> list[int]:
        """Ids with as many image tokens as features for each one. Raises ValueError where they are not as many as
        pictures: a text may spell one."""
        token = self.vision.image_token
        if (found := ids.count(token)) != len(grids):
            raise ValueError(f"{found} image tokens in the prompt and {len(grids)} pictures (a text may spell {PAD})")
        sizes = iter(grids)
        return [each for i in ids for each in ([token] * self.tokens(next(sizes)) if i == token else [i])]

    def shortened(self, ids: list[int], grids: tuple[Grid, ...]) -> list[int]:
        """`expanded`, undone."""
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
            except PictureError as error:
                raise PictureError(f"picture {number}: {error}") from error
        return found


def digest(image: Image.Image) -> int:
    """32 bits of the pixels."""
    return zlib.crc32(image.tobytes())
