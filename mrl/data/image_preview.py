"""Images in the output of `mrl data`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mrl.data.image_processor import Grid, ImageProcessor


def image_summary(grids: Sequence[Grid], all_tokens: int, image_processor: ImageProcessor) -> str:
    """Returns a line on the images of a data set. all_tokens: total number of tokens of the data set"""
    if not grids:
        return "  no images"
    tokens = [image_processor.tokens(grid) for grid in grids]
    each = f"{sum(tokens) / len(tokens):.0f} tokens each, at most {max(tokens)}"
    return f"  {len(grids)} images: {each}; {sum(tokens) / all_tokens:.0%} of all tokens"


def image_line(grid: Grid, image_processor: ImageProcessor) -> str:
    """Returns a line on one image. grid: its rows and columns of patches"""
    (rows, columns), patch = grid, image_processor.vision.patch
    return f"image: resized to {columns * patch} x {rows * patch} pixels, {image_processor.tokens(grid)} tokens"


def write_contact_sheet(shown: Mapping[int, Sequence[bytes]], sheet: Path) -> str:
    """Writes the contact sheet `sheet` and returns a line on it. shown: PNGs by row number. Raises as `write_sheet`."""
    from mrl.data.contact_sheet import write_sheet

    return f"\n{write_sheet(shown, sheet)} images, resized as for the model: {sheet}"
