"""Contact sheet: the images of some rows as the model sees them, in one image for inspection."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from mrl.data.errors import DataError

CELL, GAP, LINE = 192, 8, 14  # pixels: of a picture's longer side at most, between pictures, of a line of text
MAX_COLUMNS = 8


def write_sheet(shown: Mapping[int, Sequence[bytes]], file: Path) -> int:
    """Writes the PNG `file` with one row of images for each row of the data; small images are enlarged.

    Args:
        shown: PNGs by row number.

    Returns:
        The number of images.

    Raises:
        DataError: if there are no images, or `file` cannot be written.
    """
    rows = {number: pictures for number, pictures in shown.items() if pictures}
    if not rows:
        raise DataError("none of the shown rows has an image: show more rows with --samples")
    columns = min(MAX_COLUMNS, max(map(len, rows.values())))
    step = CELL + GAP + LINE
    sheet = Image.new("RGB", (GAP + columns * (CELL + GAP), GAP + len(rows) * step), "white")
    draw = ImageDraw.Draw(sheet)
    for place, (number, pictures) in enumerate(rows.items()):
        top = GAP + place * step
        draw.text((GAP, top), f"row {number}: {len(pictures)} images", "black")
        for column, png in enumerate(pictures[:columns]):
            sheet.paste(_fitted(Image.open(io.BytesIO(png))), (GAP + column * (CELL + GAP), top + LINE))
    try:
        sheet.save(file, "PNG")
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error.strerror or error}") from error
    return sum(map(len, rows.values()))


def _fitted(image: Image.Image) -> Image.Image:
    scale = CELL / max(image.size)
    size = [max(1, round(side * scale)) for side in image.size]
    return image.resize((size[0], size[1]), Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BICUBIC)
