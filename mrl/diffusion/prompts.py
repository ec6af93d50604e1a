"""Data rows in the order of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.config.sections.diffusion import DiffusionDataConfig
from mrl.data import DataError
from mrl.data.row_sampler import RowSampler
from mrl.data.sources import Rows, open_rows
from mrl.diffusion.conditioning import PromptRow
from mrl.foreign import own_file


class PromptRows:
    """Rows of the data; the rows of a step depend on (seed, step) alone, so there is no state to save.

    Raises DataError for a source without rows.
    """

    def __init__(self, cfg: DiffusionDataConfig, seed: int) -> None:
        self._cfg, self._seed = cfg, seed
        self._rows: list[Rows] = [open_rows(source) for source in cfg.train]
        for source, rows in zip(cfg.train, self._rows, strict=True):
            if not len(rows):
                raise DataError(f"{source.path}: no rows")
        self._order = RowSampler(cfg.train, [len(rows) for rows in self._rows], cfg.shuffle)

    def of_step(self, step: int, count: int) -> list[tuple[int, PromptRow]]:
        """Returns `count` pairs (source number, row). Raises DataError for a row without text and class."""
        return [(s, self._read(s, i)) for s, i in self._order.of_step(step, count, self._seed)]

    def all(self) -> Iterator[tuple[int, PromptRow]]:
        """Yields (source number, row) of every row. Raises DataError like `of_step`."""
        for source, rows in enumerate(self._rows):
            for i in range(len(rows)):
                yield source, self._read(source, i)

    def first(self, count: int) -> list[PromptRow]:
        """Returns the first `count` rows in file order, repeated if there are fewer."""
        rows = [self._read(s, i) for s, i in self._order.first(count)]
        return [rows[i % len(rows)] for i in range(count)]

    def image(self, source: int, prompt: PromptRow, channels: int, size: tuple[int, int]) -> Tensor:
        """Returns [channels, height, width] float32 in 0..1 from the row's image file. Raises DataError."""
        picture = self._picture(source, prompt).convert("L" if channels == 1 else "RGB").resize(size[::-1])
        levels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        return levels.view(size[0], size[1], -1).permute(2, 0, 1).float() / 255

    def picture_size(self, source: int, prompt: PromptRow) -> str:
        """Returns name and size of the row's image file. Raises DataError."""
        width, height = self._picture(source, prompt).size
        return f"{prompt.row[self._cfg.image_key]}: {width} x {height}"

    def _picture(self, source: int, prompt: PromptRow) -> Any:
        from PIL import Image

        name = prompt.row.get(self._cfg.image_key)
        if not isinstance(name, str):
            raise DataError(f"a row of {self._cfg.train[source].path} has no path under {self._cfg.image_key!r}")
        folder = Path(self._cfg.train[source].path).parent
        try:
            with Image.open(own_file(folder, name)) as opened:
                opened.load()
                return opened.copy()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{folder / name} is not a readable image: {error}") from error

    def _read(self, source: int, i: int) -> PromptRow:
        rows, cfg = self._rows[source], self._cfg
        try:
            row: dict[str, Any] = rows[i]
        except ValueError as error:
            raise DataError(f"{rows.where(i)}: {error}") from error
        text, label = row.get(cfg.prompt_key), row.get(cfg.label_key)
        if label is not None and (not isinstance(label, int) or isinstance(label, bool)):
            raise DataError(f"{rows.where(i)}: {cfg.label_key!r} (data.label_key) must be a number, got {label!r}")
        if text is None and label is None:
            raise DataError(f"{rows.where(i)} has neither {cfg.prompt_key!r} nor {cfg.label_key!r}")
        return PromptRow(str(label) if text is None else str(text), label, row)
