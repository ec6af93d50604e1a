"""Image store: images of a rollout's rows are decoded again on each rank; references travel, pixels do not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from mrl.config.schema import SourceConfig
from mrl.data.errors import DataError
from mrl.data.image_positions import UNKNOWN
from mrl.data.image_processor import ImageProcessor, digest
from mrl.data.images import ImageError
from mrl.data.sources import OpenSource

KEPT_BYTES = 256 << 20  # of pixels


class ImageStore:
    """Pixel values of the images of several sources, whose rows are numbered one source after the other. A source is
    opened when its first image is needed; recently used pixels are cached.
    """

    def __init__(self, sources: Sequence[SourceConfig | OpenSource], image_processor: ImageProcessor) -> None:
        self._given, self._image_processor = sources, image_processor
        self._kept: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._bytes = 0

    def __call__(self, images: Tensor) -> Tensor:
        """Returns the pixel values of images [k, 5], named as in `mrl.data.image_positions`: [patches, patch values]
        float32, concatenated.

        Raises DataError for an image that has changed since its prompt was sampled.
        """
        return torch.cat([self._pixels(*image) for image in images.tolist()])

    def _pixels(self, row: int, number: int, rows: int, columns: int, crc: int) -> Tensor:
        key = row, number, rows, columns, crc
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        source = next(each for each in reversed(self._sources) if each.first_index <= row)
        try:
            image = self._image_processor.image(source.rows[row - source.first_index], source.root, number)
            pixels = self._image_processor.pixels(image)
        except (ImageError, IndexError) as error:
            raise DataError(f"{source.where(row)}: image {number}: {error}") from error
        if (crc != UNKNOWN and digest(image) != crc) or len(pixels) != rows * columns:
            than = "on rank 0" if crc != UNKNOWN else "its header said at the start of the run"
            raise DataError(
                f"{source.where(row)}: image {number} decodes differently here than {than}: its file has changed, or "
                "the nodes have different versions of Pillow"
            )
        self._keep(key, pixels)
        return pixels

    def _keep(self, key: tuple[int, ...], pixels: Tensor) -> None:
        self._kept[key] = pixels
        self._bytes += pixels.nbytes
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes

    @cached_property
    def _sources(self) -> list[OpenSource]:
        found: list[OpenSource] = []
        for source in self._given:
            first = sum(len(each.rows) for each in found)
            found.append(source if isinstance(source, OpenSource) else OpenSource(source, first))
        return found
