"""Images of a data row: read safely, decoded and resized once, identically for the engine and the trainer.

A row names an image by a path below the folder of its data file, as bytes, as the `datasets` library's Image feature
({"bytes": ..., "path": ...}) or as "data:image/png;base64,...". Nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from PIL import Image, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")  # parsers of anything else are never reached
MAX_BYTES = 32 << 20  # of a picture as it is stored
MAX_PIXELS = 64_000_000  # of a picture as it is stored: known before decoding
MAX_RATIO = 200  # of its sides
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)  # EXIF's tag, and its values that exchange the sides


TAIL_BYTES, JPEG_END = 1 << 16, b"\xff\xd9"


class ImageError(ValueError):
    """An image cannot be used; the message says why."""


@dataclass(frozen=True)
class SizeBounds:
    """Bounds of image sizes: sides are multiples of `unit` pixels, areas lie between `low` and `high` pixels."""

    unit: int
    low: int
    high: int

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """Returns (width, height) of about the same aspect ratio within the bounds, by the rule of transformers'
        Qwen2-VL processor; a size that fits stays as it is. Raises ImageError for an aspect ratio above MAX_RATIO.
        """
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ImageError(f"{width} x {height}: its aspect ratio is above {MAX_RATIO}")
        unit = self.unit
        wide, high = (round(side / unit) * unit for side in (width, height))
        if wide * high > self.high:
            shrink = math.sqrt(width * height / self.high)
            wide, high = (max(unit, math.floor(side / shrink / unit) * unit) for side in (width, height))
        elif wide * high < self.low:
            grow = math.sqrt(self.low / (width * height))
            wide, high = (math.ceil(side * grow / unit) * unit for side in (width, height))
        return wide, high


def size_of(value: Any, root: Path) -> tuple[int, int]:
    """Returns (width, height) as displayed, without decoding. Raises ImageError, also for a truncated image."""
    with _opened(value, root) as (image, file):
        turned = _has_exif(image) and image.getexif().get(ORIENTATION) in TURNED
        ends = WHOLE.get(image.format or "")
        if ends is not None and not ends(file):
            raise ImageError("the file is truncated")
        return (image.height, image.width) if turned else (image.width, image.height)


def read_image(value: Any, root: Path, bounds: SizeBounds) -> Image.Image:
    """Returns the RGB image in the size that the model sees: upright, the first frame, transparency on white. Raises
    ImageError.
    """
    with _opened(value, root) as (image, _):
        upright = ImageOps.exif_transpose(image) if _has_exif(image) else image
        if "A" in upright.getbands() or "transparency" in upright.info:
            over = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", over.size, (255, 255, 255, 255)), over)
        found = upright.convert("RGB")
    size = bounds.fit(*found.size)
    return found if found.size == size else found.resize(size, Image.Resampling.BICUBIC)


def png(image: Image.Image) -> bytes:
    """Returns the image as lossless PNG, which the engine accepts."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


@contextmanager
def _opened(value: Any, root: Path) -> Iterator[tuple[Image.Image, IO[bytes]]]:
    """Yields the image and its file, not yet decoded. Any error of PIL on a foreign file becomes an ImageError."""
    try:
        with _stored(value, root) as file, warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(file, formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise ImageError(f"{image.width} x {image.height} pixels; the limit is {MAX_PIXELS} pixels")
            yield image, file
    except ImageError:
        raise
    except (Exception, Image.DecompressionBombWarning) as error:
        what = " ".join(str(error).split())[:200] or type(error).__name__
        raise ImageError("it is not a readable image (" + what.replace(f"{root}/", "") + ")") from error


def _has_exif(image: Image.Image) -> bool:
    """Returns True if the header has EXIF data: PIL would decode a whole PNG to look for EXIF behind its pixels."""
    return image.format != "PNG" or "exif" in image.info


def _png_ends(file: IO[bytes]) -> bool:
    """Returns True if the chunks are complete up to the last one."""
    size, at = file.seek(0, 2), 8
    while at + 12 <= size:
        file.seek(at)
        length, kind = struct.unpack(">I4s", file.read(8))
        at += 12 + length
        if kind == b"IEND":
            return at <= size
    return False


def _jpeg_ends(file: IO[bytes]) -> bool:
    """Returns True if the end-of-image marker is in the tail, or before data that a camera has appended."""
    file.seek(-min(file.seek(0, 2), TAIL_BYTES), 2)
    if JPEG_END in file.read():
        return True
    file.seek(0)
    return JPEG_END in file.read()


def _webp_ends(file: IO[bytes]) -> bool:
    """Returns True if the file has the number of bytes that its header says."""
    file.seek(4)
    (length,) = struct.unpack("<I", file.read(4))
    return bool(file.seek(0, 2) >= 8 + length)


WHOLE: dict[str, Callable[[IO[bytes]], bool]] = {"PNG": _png_ends, "JPEG": _jpeg_ends, "WEBP": _webp_ends}


def _stored(value: Any, root: Path) -> IO[bytes]:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        return io.BytesIO(_inline(value)) if value.startswith("data:") else _below(root, value).open("rb")
    if not isinstance(value, bytes):
        raise ImageError(f"an image must be a path, bytes or a data: URL, not {type(value).__name__}")
    if len(value) > MAX_BYTES:
        raise ImageError(f"{len(value)} bytes; the limit is {MAX_BYTES}")
    return io.BytesIO(value)


def _inline(text: str) -> bytes:
    head, _, body = text.partition(",")
    if not head.endswith(";base64"):
        raise ImageError("a data: URL must be base64")
    if len(body) > MAX_BYTES * 4 // 3 + 4:
        raise ImageError(f"more than the limit of {MAX_BYTES} bytes")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the data: URL is not base64: {error}") from error


def _below(root: Path, name: str) -> Path:
    if "://" in name:
        raise ImageError(f"{name[:60]!r}: mrl downloads no images: store them below the data's directory")
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()):
            raise ImageError(f"{name[:200]!r} is outside of {root}")
        if not path.is_file():
            raise ImageError(f"{name[:200]!r} is not a file below {root}")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ImageError(f"{name[:200]!r} has {size} bytes; the limit is {MAX_BYTES}")
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(f"{name[:60]!r} is not a path: {error}") from error
    return path
