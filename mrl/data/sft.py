"""Rows for supervised fine-tuning of one or several sources, and the batches of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from mrl.config.schema import SFTDataConfig, SourceConfig
from mrl.core import Rollout
from mrl.data.dataset import end_notes, row_notes
from mrl.data.encoded_rows import EncodedRows
from mrl.data.encoder import Encoder
from mrl.data.sft_rows import SFTReader
from mrl.data.sft_source import SFTExample, SFTSource
from mrl.data.tokenizer import Tokenizer


class SFTDataset(EncodedRows[SFTSource, SFTExample]):
    """Data set for supervised fine-tuning. Raises DataError for malformed rows, and for a source without usable
    rows.
    """

    def __init__(self, sources: Sequence[SourceConfig], cfg: SFTDataConfig, tokenizer: Tokenizer) -> None:
        self.cfg, self.tokenizer = cfg, tokenizer
        encoder, reader = Encoder(cfg, tokenizer), SFTReader(cfg)
        super().__init__(
            sources,
            lambda source, first: SFTSource(source, encoder, reader, first),
            lambda found: f"{found.long_prompt} have too long a prompt, and {found.unlearnt} have no token to train on",
            cfg.shuffle,
        )

    @property
    def end_tokens(self) -> set[int]:
        """End tokens that the model learns to stop with."""
        return {token for source in self.sources for token in source.end_tokens}

    def batch(self, step: int, numbers: Sequence[int]) -> Rollout:
        """Returns these rows as samples, as `batch_of`."""
        return self.batch_of(step, [self.rows[number] for number in numbers])

    def batch_of(self, step: int, rows: Sequence[SFTExample]) -> Rollout:
        """Returns rows, or parts of them, as samples; untrained response tokens have weight 0."""
        counts = None
        if any(row.weights is not None for row in rows):
            ones = (np.ones(len(row.ids) - row.prompt, dtype=np.float32) for row in rows)
            each = [one if row.weights is None else row.weights for row, one in zip(rows, ones, strict=True)]
            counts = torch.from_numpy(np.concatenate(each))
        return Rollout.of(
            step,
            [row.ids[: row.prompt] for row in rows],
            [row.ids[row.prompt :] for row in rows],
            rows=torch.tensor([row.index for row in rows]),
            loss_weights=counts,
        )

    def batches(self, numbers: Sequence[int], rows_at_once: int) -> Iterator[tuple[list[str | None], Rollout]]:
        """Yields these rows in parts: the data source of each row, and the samples."""
        for first in range(0, len(numbers), rows_at_once):
            part = numbers[first : first + rows_at_once]
            yield [self.rows[number].source for number in part], self.batch(0, part)


def sft_notes(key: str, data: SFTDataset) -> Iterator[str]:
    """Yields one sentence for each kind of dropped or truncated rows. key: configuration key of the sources"""
    cfg = data.cfg
    yield from end_notes(key, data.end_tokens, data.tokenizer)
    for source in data.sources:
        place = key if len(data.sources) == 1 else f"{key}, {source.source.path}"
        limits = f"data.max_prompt_tokens={cfg.max_prompt_tokens}" + (
            f" or data.max_tokens={cfg.max_tokens}" if cfg.max_tokens is not None else ""
        )
        for count, what in (
            (source.long_prompt, f"left out: their prompt does not fit into {limits}"),
            (source.unlearnt, "left out: they have no token to train on"),
            (source.cut_prompt, f"with a prompt truncated to {cfg.max_prompt_tokens} tokens"),
            (source.cut, f"truncated to {cfg.max_tokens} tokens: they have no end token"),
        ):
            if count:
                yield f"{place}: {count} rows {what}"
        yield from row_notes(place, source, cfg.chat_template)
