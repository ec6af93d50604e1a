"""Usable prompts of one source, tokenised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mrl.config.schema import SourceConfig
from mrl.core import Prompt
from mrl.data.columns import unused_columns
from mrl.data.encoder import Encoder, RenderedPrompt
from mrl.data.errors import DataError, raise_for
from mrl.data.rows import RowReader
from mrl.data.sources import OpenSource
from mrl.data.tokenizer import TokenizerError

if TYPE_CHECKING:
    from mrl.data.image_processor import Grid, ImageProcessor

BATCH_ROWS = 1024  # tokenised at once


class PromptSource(OpenSource):
    """Prompts of one source. Token ids are kept in one array; rows are read again from disk for the prompts of a step.

    first_index: index of its row 0 in the data set
    dropped, cut: prompts over `data.max_prompt_tokens` that were dropped, or truncated
    longest: tokens of the longest prompt, before truncation
    as_text, as_control: for each row with control tokens, the first one's name; see `Encoder.render`
    Raises DataError that names every malformed row.
    """

    def __init__(self, source: SourceConfig, encoder: Encoder, reader: RowReader, first_index: int) -> None:
        super().__init__(source, first_index)
        self.dropped = self.longest = 0
        self._cut_rows: set[int] = set()
        self.as_text: list[str] = []
        self.as_control: list[str] = []
        self._encoder, self._reader = encoder, reader
        self._grids: dict[int, tuple[Grid, ...]] = {}  # by row, of rows with images
        self._problems: list[tuple[str, str]] = []
        kept: list[int] = []
        tokens: list[np.ndarray] = []
        for i, ids in self._encoded():
            kept.append(i)
            tokens.append(np.asarray(ids, dtype=np.int32))
        raise_for(self._problems)
        if not len(self.rows):
            raise DataError(f"{source.path}: no rows")
        self._kept = np.asarray(kept, dtype=np.int64)
        self._tokens = np.concatenate([np.empty(0, dtype=np.int32), *tokens])
        self._ends = np.cumsum([len(ids) for ids in tokens], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def cut(self) -> int:
        return len(self._cut_rows)

    @property
    def grids(self) -> list[Grid]:
        """Patch grids of the images of the usable prompts."""
        return [grid for i in self._kept.tolist() for grid in self._grids.get(i, ())]

    @property
    def token_counts(self) -> np.ndarray:
        """Token counts of the usable prompts, [P]."""
        return np.diff(self._ends, prepend=0)

    def prompt(self, place: int) -> Prompt:
        """Returns the usable prompt at `place`, with its row read again."""
        i, end, image_processor = int(self._kept[place]), int(self._ends[place]), self._encoder.image_processor
        ids = self._tokens[self._ends[place - 1] if place else 0 : end].tolist()
        row = self._reader.complete(self.rows[i], self.source.name)
        text = self._encoder.text(row)
        if i in self._cut_rows:
            text = self._encoder.tokenizer.decode(ids, special=True)
        prompt = Prompt(self.first_index + i, tuple(ids), row, text)
        return prompt if image_processor is None else self._with_pictures(prompt, i, image_processor)

    def _with_pictures(self, prompt: Prompt, i: int, image_processor: ImageProcessor) -> Prompt:
        """Adds the images. Raises DataError for images that cannot be decoded, or have changed."""
        try:
            found = image_processor.pictures(self.rows[i], self.root)
        except ValueError as error:
            raise DataError(f"{self.rows.where(i)}: {error}") from error
        if tuple(each.grid for each in found) != self._grids.get(i, ()):
            raise DataError(f"{self.rows.where(i)}: its images have changed size since the start of the run")
        return replace(
            prompt,
            pictures=tuple(each.png for each in found),
            images=tuple((*each.grid, each.digest) for each in found),
            unexpanded_token_ids=tuple(
                image_processor.collapse_image_tokens(list(prompt.token_ids), tuple(each.grid for each in found))
            ),
        )

    def _encoded(self) -> Iterator[tuple[int, list[int]]]:
        """Yields (row, ids) of the usable rows; errors of other rows go to `_problems`."""
        for start in range(0, len(self.rows), BATCH_ROWS):
            prompts = dict(self._prompts(range(start, min(start + BATCH_ROWS, len(self.rows)))))
            for i, ids in zip(prompts, self._encoder.ids(list(prompts.values())), strict=True):
                fitting = self._fit(i, ids)
                if fitting is not None:
                    self.as_text += filter(None, [prompts[i].as_text])
                    self.as_control += filter(None, [prompts[i].as_control])
                    yield i, fitting

    def _prompts(self, rows: range) -> Iterator[tuple[int, RenderedPrompt]]:
        for i in rows:
            try:
                row = self._reader.read(self.rows, i, self.source.name)
                self.unused_columns.update(
                    unused_columns(row, self._encoder.cfg, self._encoder.image_processor is not None)
                )
                if self._encoder.image_processor is not None and (
                    grids := self._encoder.image_processor.grids(self.rows[i], self.root)
                ):
                    self._grids[i] = grids
                yield i, self._encoder.render(row, self._reader.require_answer)
            except TokenizerError as error:  # every other row would fail alike
                raise TokenizerError(f"{self.rows.where(i)}: {error}") from None
            except ValueError as error:
                self._problems.append((self.rows.where(i), str(error)))

    def _fit(self, i: int, ids: list[int]) -> list[int] | None:
        """Returns the ids within `data.max_prompt_tokens`; None for a prompt that is dropped."""
        cfg, image_processor, problem = self._encoder.cfg, self._encoder.image_processor, None
        if image_processor is not None:
            try:
                ids = image_processor.expand_image_tokens(ids, self._grids.get(i, ()))
            except ValueError as error:
                self._problems.append((self.rows.where(i), str(error)))
                return None
        self.longest = max(self.longest, len(ids))
        if not ids:
            problem = "the prompt has no tokens"
        elif len(ids) > cfg.max_prompt_tokens and cfg.truncation == "error":
            problem = f"{len(ids)} tokens, more than data.max_prompt_tokens={cfg.max_prompt_tokens} (data.truncation)"
        if problem:
            self._problems.append((self.rows.where(i), problem))
            return None
        if len(ids) <= cfg.max_prompt_tokens:
            return ids
        if cfg.truncation == "drop":
            self.dropped += 1
            return None
        self._cut_rows.add(i)
        return self._encoder.cut(ids)
