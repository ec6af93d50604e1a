"""The usable preferences of one source, tokenised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mrl.config.schema import SourceConfig
from mrl.data.encoder import Encoder
from mrl.data.errors import DataError, raise_for
from mrl.data.preference_rows import Compared, PreferenceReader, common_start
from mrl.data.sources import open_rows
from mrl.data.tokenizer import TokenizerError

BATCH_ROWS = 512  # tokenised at once


@dataclass(frozen=True)
class Preference:
    """One usable row. index: its row number; prompt, responses int32: chosen, rejected, or the only one; label: of
    that; is_cut: a response lacks its end."""

    index: int
    prompt: np.ndarray
    responses: tuple[np.ndarray, ...]
    label: bool | None
    source: str | None
    is_cut: bool


class PreferenceSource:
    """What is left out or cut is counted in rows:

    long_prompt: left out, their prompt is over `data.max_prompt_tokens` or fills `data.max_tokens`
    same: left out, both responses are the same, if only after the cut
    cut_prompt, cut: kept with a shorter prompt, or a response without its end
    merged: kept; a token lies over the end of the prompt, and belongs to the responses

    Raises DataError that names every malformed row.
    """

    def __init__(self, source: SourceConfig, encoder: Encoder, reader: PreferenceReader, first_index: int) -> None:
        self.source, self.first_index = source, first_index
        self.rows = open_rows(source)
        self.long_prompt = self.same = self.cut_prompt = self.cut = self.merged = 0
        self.as_text: list[str] = []
        self.as_control: list[str] = []
        self._encoder, self._reader, self._cfg = encoder, reader, reader.cfg
        self._problems: list[tuple[str, str]] = []
        self.kept = list(self._encoded())
        raise_for(self._problems)
        if not len(self.rows):
            raise DataError(f"{source.path}: no rows")

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def name(self) -> str:
        """Path and split, for messages."""
        return self.source.path if self.source.split is None else f"{self.source.path}[{self.source.split}]"

    @property
    def left_out(self) -> int:
        return self.long_prompt + self.same

    def where(self, index: int) -> str:
        """File and row of a row's index in the data set."""
        return self.rows.where(index - self.first_index)

    def _encoded(self) -> Iterator[Preference]:
        for start in range(0, len(self.rows), BATCH_ROWS):
            found = dict(self._compared(range(start, min(start + BATCH_ROWS, len(self.rows)))))
            texts = [each for row in found.values() for each in ([row.prompt] if row.prompt else []) + [*row.wholes]]
            ids = iter(self._encoder.ids(texts))
            for i, row in found.items():
                self.as_text += filter(None, [each.as_text for each in row.wholes][:1])
                self.as_control += filter(None, [each.as_control for each in row.wholes][:1])
                prompt = next(ids) if row.prompt else None
                fitting = self._fit(i, prompt, [self._ended(next(ids)) for _ in row.wholes])
                if fitting is not None:
                    parts, is_cut = fitting
                    kept, *responses = (np.asarray(part, dtype=np.int32) for part in parts)
                    yield Preference(self.first_index + i, kept, tuple(responses), row.label, row.source, is_cut)

    def _compared(self, rows: range) -> Iterator[tuple[int, Compared]]:
        for i in rows:
            try:
                yield i, self._reader.dressed(self._reader.read(self.rows, i, self.source.name), self._encoder)
            except TokenizerError as error:  # so would every other row
                raise TokenizerError(f"{self.rows.where(i)}: {error}") from None
            except ValueError as error:
                self._problems.append((self.rows.where(i), str(error)))

    def _ended(self, ids: list[int]) -> list[int]:
        """Text with one EOS at its end; a conversation ends as its template does."""
        eos = self._encoder.tokenizer.eos_id
        return ids if self._cfg.chat_template or ids[-1:] == [eos] else [*ids, eos]

    def _fit(self, i: int, prompt: list[int] | None, wholes: list[list[int]]) -> tuple[list[list[int]], bool] | None:
        """([prompt, *responses] within the limits, whether a response was cut); None for a row that is left out, or
        cannot be used.

        The prompt ends where its own tokens and those of every whole text part: tokens may merge over its end.
        """
        shared = min(common_start(*wholes, *([prompt] if prompt else [])), *(len(ids) - 1 for ids in wholes))
        cfg, ids = self._cfg, wholes[0][:shared]
        problem = None
        if shared < 1:
            problem = "no token of a prompt is shared by prompt and responses" if wholes[0] else "no tokens"
        elif len(ids) > cfg.max_prompt_tokens and cfg.truncation == "error":
            problem = f"{len(ids)} tokens, more than data.max_prompt_tokens={cfg.max_prompt_tokens} (data.truncation)"
        if problem:
            self._problems.append((self.rows.where(i), problem))
            return None
        is_long = len(ids) > cfg.max_prompt_tokens
        ids = self._encoder.cut(ids) if is_long and cfg.truncation != "drop" else ids
        room = cfg.max_tokens - len(ids)
        responses = [whole[shared : shared + max(room, 0)] for whole in wholes]
        if len(ids) > cfg.max_prompt_tokens or room < 1:
            self.long_prompt += 1
        elif len(responses) > 1 and responses[0] == responses[1]:
            self.same += 1
        else:
            self.merged += prompt is not None and shared < len(prompt)
            self.cut_prompt += is_long
            self.cut += (is_cut := any(len(whole) - shared > room for whole in wholes))
            return [ids, *responses], is_cut
        return None
