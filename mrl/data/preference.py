"""Preferences of one or several sources, and the batches of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch

from mrl.config.schema import PreferenceDataConfig, SourceConfig
from mrl.core import Rollout
from mrl.data.dataset import control_notes
from mrl.data.encoder import Encoder
from mrl.data.errors import DataError
from mrl.data.mixture import Mixture
from mrl.data.order import Order
from mrl.data.preference_rows import PreferenceReader
from mrl.data.preference_source import Preference, PreferenceSource
from mrl.data.tokenizer import Tokenizer


class PreferenceDataset:
    """The usable rows of all sources, tokenised; a row's number is its place among them.

    form: what a row is. Of pairs a batch has the chosen response before the rejected one. `Rollout.scores` holds 1 for
    what is chosen or labelled true, 0 for the rest.

    Raises DataError for malformed rows, and if nothing is left of a source.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        cfg: PreferenceDataConfig,
        tokenizer: Tokenizer,
        form: Literal["pairs", "labels"],
    ) -> None:
        self.cfg, self.tokenizer, self.form = cfg, tokenizer, form
        encoder, reader = Encoder(cfg, tokenizer), PreferenceReader(cfg, form)
        self.sources: list[PreferenceSource] = []
        for source in sources:
            first = sum(len(found.rows) for found in self.sources)
            self.sources.append(found := PreferenceSource(source, encoder, reader, first))
            if not found:
                why = f"{found.long_prompt} have too long a prompt, {found.same} the same response twice"
                raise DataError(f"{source.path}: none of its {len(found.rows)} rows can be used: {why}")
        sizes = [len(source) for source in self.sources]
        self._order, self._first = Order(sources, sizes, cfg.shuffle), [sum(sizes[:i]) for i in range(len(sizes))]
        self.rows: list[Preference] = [row for source in self.sources for row in source.kept]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def per_row(self) -> int:
        """Responses of a row."""
        return 1 if self.form == "labels" else 2

    @property
    def mixture(self) -> Mixture:
        """How the sources are mixed."""
        return self._order.mixture

    def of_step(self, step: int, n: int, seed: int) -> list[int]:
        """Numbers of the n rows of step `step` (from 0), as `Order.of_step` has them."""
        return [self._first[source] + place for source, place in self._order.of_step(step, n, seed)]

    def where(self, row: Preference) -> str:
        """File and row, for messages."""
        return next(s for s in reversed(self.sources) if s.first_index <= row.index).where(row.index)

    def batch(self, step: int, numbers: Sequence[int]) -> Rollout:
        """These rows: a pair is two samples, one after the other, of one group."""
        rows, each = [self.rows[number] for number in numbers], self.per_row
        labels = [float(row.label) if row.label is not None else 1.0 - i for row in rows for i in range(each)]
        return Rollout.of(
            step,
            [row.prompt for row in rows for _ in range(each)],
            [response for row in rows for response in row.responses],
            group=torch.arange(len(rows)).repeat_interleave(each),
            scores=torch.tensor(labels),
            rows=torch.tensor([row.index for row in rows]).repeat_interleave(each),
        )

    def digest(self) -> str:
        """Of every usable row's token ids, as they are after template and cut."""
        found = hashlib.blake2b(digest_size=16)
        for row in self.rows:
            for part in (row.prompt, *row.responses):
                found.update(np.int64(len(part)).tobytes() + part.tobytes())
        return found.hexdigest()


def mismatched(batch: Rollout, most_tokens: int) -> Rollout:
    """Every prompt of the batch with the response of the row after it, the last with the first one's; responses are
    cut to `most_tokens` of both."""
    texts = [text.numpy() for text in batch.tokens.split(batch.seq_lens.tolist())]
    lens = batch.prompt_lens.tolist()
    prompts = [text[:n] for text, n in zip(texts, lens, strict=True)]
    responses = [text[n:] for text, n in zip(texts, lens, strict=True)]
    moved = [*responses[1:], responses[0]]
    cut = [response[: most_tokens - len(prompt)] for prompt, response in zip(prompts, moved, strict=True)]
    return Rollout.of(batch.step, prompts, cut, rows=batch.rows)


def preference_notes(key: str, data: PreferenceDataset) -> Iterator[str]:
    """What was left out or cut, one sentence each. key: that names the sources."""
    cfg = data.cfg
    for source in data.sources:
        place = key if len(data.sources) == 1 else f"{key}, {source.source.path}"
        limits = f"data.max_prompt_tokens={cfg.max_prompt_tokens} or data.max_tokens={cfg.max_tokens}"
        for count, what in (
            (source.long_prompt, f"left out: their prompt does not fit into {limits}"),
            (source.same, "left out: both responses are the same"),
            (source.cut_prompt, f"with a prompt cut to {cfg.max_prompt_tokens} tokens"),
            (source.cut, f"with a response cut to {cfg.max_tokens} tokens, prompt included: it has no end"),
            (source.merged, "where a token lies over the end of the prompt: it counts as the response's"),
        ):
            if count:
                yield f"{place}: {count} rows {what}"
        yield from control_notes(place, source.as_text, source.as_control, cfg.chat_template)
