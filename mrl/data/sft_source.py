"""Usable rows of one source for supervised fine-tuning, tokenised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mrl.config.schema import SourceConfig
from mrl.data.columns import unused_columns
from mrl.data.encoded_rows import EncodedSource
from mrl.data.encoder import Encoder
from mrl.data.sft_rows import RenderedSFTRow, SFTReader, encoded
from mrl.data.turns import AssistantTurns


@dataclass(frozen=True)
class SFTExample:
    """One usable row.

    index: its row number; ids int32: all its tokens; prompt: number of tokens before the first trainable one; weights
    float32 [len(ids) - prompt]: loss weight of the other tokens, None: 1; is_cut: it lacks its end; is_headless: it is
    a piece that lacks its row's beginning
    """

    index: int
    ids: np.ndarray
    prompt: int
    weights: np.ndarray | None
    source: str | None
    is_cut: bool
    starts_mid_row: bool = False

    @property
    def num_trained_tokens(self) -> int:
        """Number of trained tokens."""
        return len(self.ids) - self.prompt if self.weights is None else int((self.weights > 0).sum())


class SFTSource(EncodedSource[SFTExample]):
    """Rows of one source. Dropped and truncated rows are counted:

    long_prompt: dropped, their prompt is over `data.max_prompt_tokens` or fills `data.max_tokens`
    unlearnt: dropped, no token is trained, if only after the cut
    cut_prompt, cut: kept with a shorter prompt, or without their end
    longest: tokens of the longest row, before truncation
    end_tokens: end tokens that the model learns to stop with
    Raises DataError that names every malformed row.
    """

    def __init__(self, source: SourceConfig, encoder: Encoder, reader: SFTReader, first_index: int) -> None:
        super().__init__(source, encoder, first_index)
        self.long_prompt = self.unlearnt = self.cut_prompt = self.cut = self.longest = 0
        self.end_tokens: set[int] = set()
        self._reader, self._cfg, self._turns = reader, reader.cfg, AssistantTurns(encoder, reader.cfg)
        self._keep(self._encoded())

    @property
    def num_dropped(self) -> int:
        return self.long_prompt + self.unlearnt

    def _encoded(self) -> Iterator[SFTExample]:
        for found in self._parts(self._rendered_row):
            ids = encoded(self._encoder, list(found.values()))
            for (i, row), (prompt, rest) in zip(found.items(), ids, strict=True):
                if (example := self._example(i, row, prompt, rest)) is not None:
                    said = row.prompt or row.text or row.conversation
                    assert said is not None
                    self.as_text += filter(None, [said.as_text])
                    self.as_control += filter(None, [said.as_control])
                    yield example

    def _rendered_row(self, i: int) -> RenderedSFTRow:
        row = self._reader.read(self.rows, i, self.source.name)
        self.unused_columns.update(unused_columns(row, self._cfg, sees_pictures=False))
        return self._reader.render(row, self._turns)

    def _example(self, i: int, row: RenderedSFTRow, prompt: list[int] | None, rest: list[int]) -> SFTExample | None:
        """Returns the example; None for a row that is dropped or unusable."""
        self.longest = max(self.longest, len(prompt or ()) + len(rest))
        kept = self._fitting(i, prompt) if prompt is not None else []
        if kept is None:
            return None
        ids = np.asarray([*kept, *rest], dtype=np.int32)
        limit = self._cfg.max_tokens or len(ids)
        if len(kept) >= limit:
            self.long_prompt += 1
            return None
        counts = self._counts(row, len(kept), len(ids))[:limit]
        if not counts[1:].any():
            self.unlearnt += 1
            return None
        first = max(1, int(counts.nonzero()[0][0]))
        weights = None if (counts[first:] == 1).all() else counts[first:]
        self.cut_prompt += prompt is not None and len(kept) < len(prompt)
        self.cut += (is_cut := len(ids) > limit)
        spans = row.conversation.spans if row.conversation is not None else [(0, len(ids))]
        self.end_tokens.update(int(ids[after - 1]) for _, after in spans if after <= limit)
        return SFTExample(self.first_index + i, ids[:limit], first, weights, row.source, is_cut)

    def _counts(self, row: RenderedSFTRow, prompt: int, total: int) -> np.ndarray:
        """Returns the loss weight of each token, [total] float32."""
        if not self._cfg.completion_only or row.text is not None:
            return np.full(total, row.weight, dtype=np.float32)
        counts = np.zeros(total, dtype=np.float32)
        if row.conversation is None:
            counts[prompt:] = row.weight
            return counts
        for (first, after), weight in zip(row.conversation.spans, row.conversation.weights, strict=True):
            counts[first:after] = row.weight * weight
        return counts

    def _fitting(self, i: int, prompt: list[int]) -> list[int] | None:
        """Returns the prompt within `data.max_prompt_tokens`; None for a row that is dropped or unusable."""
        cfg, problem = self._cfg, None
        if not prompt:
            problem = "the prompt has no tokens"
        elif len(prompt) > cfg.max_prompt_tokens and cfg.truncation == "error":
            problem = (
                f"{len(prompt)} tokens, more than data.max_prompt_tokens={cfg.max_prompt_tokens} (data.truncation)"
            )
        if problem:
            self._problems.append((self.rows.where(i), problem))
            return None
        if len(prompt) <= cfg.max_prompt_tokens:
            return prompt
        if cfg.truncation == "drop":
            self.long_prompt += 1
            return None
        return self._encoder.cut(prompt)
