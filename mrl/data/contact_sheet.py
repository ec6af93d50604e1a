"""The pictures of some prompts as the model sees them, in one picture for a person to look at."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from mrl.core import Prompt
from mrl.data.errors import DataError

CELL, GAP, LINE = 192, 8, 14  # pixels: of a picture's longer side at most, between pictures, of a line of text
MAX_COLUMNS = 8


def write_sheet(prompts: Sequence[Prompt], file: Path) -> int:
    """Writes `file`, a PNG: a row of pictures a prompt, under its row's number in the data; small ones are enlarged.
    Returns how many pictures there are. Raises DataError without any, OSError where it cannot be written."""
    rows = [prompt for prompt in prompts if prompt.pictures]
    if not rows:
        raise DataError("none of the prompts that are shown has a picture: ask for more with --samples")
    columns = min(MAX_COLUMNS, max(len(prompt.pictures) for prompt in rows))
    step = CELL + GAP + LINE
    sheet = Image.new("RGB", (GAP + columns * (CELL + GAP), GAP + len(rows) * step), "white")
    draw = ImageDraw.Draw(sheet)
    for place, prompt in enumerate(rows):
        top = GAP + place * step
        draw.text((GAP, top), f"row {prompt.index}: {len(prompt.pictures)} pictures", "black")
        for column, png in enumerate(prompt.pictures[:columns]):
            sheet.paste(_fitted(Image.open(io.BytesIO(png))), (GAP + column * (CELL + GAP), top + LINE))
    sheet.save(file, "PNG")
    return sum(len(prompt.pictures) for prompt in rows)


def _fitted(image: Image.Image) -> Image.Image:
    scale = CELL / max(image.size)
    size = [max(1, round(side * scale)) for side in image.size]
    return image.resize((size[0], size[1]), Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BICUBIC)
