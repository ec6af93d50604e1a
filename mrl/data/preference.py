"""Preference data of one or several sources, and the batches of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from mrl.config.schema import Form, PreferenceDataConfig, SourceConfig
from mrl.core import Rollout
from mrl.data.dataset import end_notes, row_notes
from mrl.data.encoded_rows import EncodedRows
from mrl.data.encoder import Encoder
from mrl.data.errors import DataError
from mrl.data.image_positions import UNKNOWN
from mrl.data.preference_rows import PreferenceReader
from mrl.data.preference_source import Preference, PreferenceSource
from mrl.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mrl.data.image_processor import ImageProcessor


class PreferenceDataset(EncodedRows[PreferenceSource, Preference]):
    """Comparisons of all usable rows.

    Args:
        form: contents of a row in a batch: the chosen response before the rejected one, all responses of a ranked list,
            the best first, or one response with its label. `Rollout.scores` holds 1 for a chosen response or a true
            label, 0 for the rest; in a list the number of worse responses; a response's score; 0 for a solution in
            steps.
        margins: every row has one, as `Preference.margin`.
        cuts: truncate responses at `data.max_tokens`; otherwise rows that do not fit are dropped.
        image_processor: image processor of a vision-language model.
        first_index: index of the first row, in the numbering of an ImageStore over several sets.

    Raises DataError for malformed rows, and for a source without usable rows.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        cfg: PreferenceDataConfig,
        tokenizer: Tokenizer,
        form: Form,
        margins: bool = False,
        cuts: bool = True,
        image_processor: ImageProcessor | None = None,
        first_index: int = 0,
    ) -> None:
        self.cfg, self.tokenizer, self.form, self.image_processor = cfg, tokenizer, form, image_processor
        encoder, reader = Encoder(cfg, tokenizer, image_processor), PreferenceReader(cfg, form, margins)
        super().__init__(
            sources,
            lambda source, first: PreferenceSource(source, encoder, reader, first, cuts),
            lambda found: ", ".join(f"{count} {what}" for count, what in _left_out(found, cfg) if count),
            cfg.shuffle,
            first_index,
        )

    @property
    def end_tokens(self) -> set[int]:
        """End tokens that the model learns to stop with."""
        return {token for source in self.sources for token in source.end_tokens}

    @property
    def per_row(self) -> int:
        """Number of responses of a row, for pairs and labels; ranked lists have any length."""
        assert self.form != "lists"
        return 2 if self.form == "pairs" else 1

    def batch(self, step: int, numbers: Sequence[int]) -> Rollout:
        """Returns these rows as samples: the responses of one comparison are one group, sample after sample."""
        rows = [self.rows[number] for number in numbers]
        sizes = torch.tensor([len(row.responses) for row in rows])
        shapes = [(*grid, UNKNOWN) for row in rows for _ in row.responses for grid in row.grids]
        counts = torch.tensor([len(row.grids) for row in rows]).repeat_interleave(sizes)
        return Rollout.of(
            step,
            [row.prompt for row in rows for _ in row.responses],
            [response for row in rows for response in row.responses],
            group=torch.arange(len(rows)).repeat_interleave(sizes),
            scores=torch.tensor([score for row in rows for score in (row.scores if not row.steps else (0.0,))]),
            rows=torch.tensor([row.index for row in rows]).repeat_interleave(sizes),
            image_counts=None if self.image_processor is None else counts,
            images=None if self.image_processor is None else torch.tensor(shapes, dtype=torch.int64).reshape(-1, 3),
        )

    def pictures(self, row: Preference) -> list[bytes]:
        """Returns the images of a row as the model sees them, as PNG. Raises DataError for an image that cannot be
        decoded.
        """
        if self.image_processor is None:
            return []
        source = next(each for each in reversed(self.sources) if each.first_index <= row.index)
        try:
            return [
                each.png
                for each in self.image_processor.pictures(source.rows[row.index - source.first_index], source.root)
            ]
        except ValueError as error:
            raise DataError(f"{source.where(row.index)}: {error}") from error

    def digest(self) -> str:
        """Returns a digest of every usable row's token ids, after template and truncation."""
        found = hashlib.blake2b(digest_size=16)
        for row in self.rows:
            for part in (row.prompt, *row.responses):
                found.update(np.int64(len(part)).tobytes() + part.tobytes())
        return found.hexdigest()


def with_prompts(batch: Rollout) -> Rollout:
    """Returns the same samples, in which a chosen response's prompt, except its first token, counts as response."""
    prompt_lens = torch.where(batch.scores > 0, batch.prompt_lens.clamp(max=1), batch.prompt_lens)
    log_probs = torch.zeros(int((batch.seq_lens - prompt_lens).sum()))
    return replace(batch, prompt_lens=prompt_lens, rollout_log_probs=log_probs)


def mismatched_pairs(batch: Rollout, most_tokens: int) -> Rollout:
    """Returns every prompt of the batch with the next response to another row's prompt, wrapping around at the end;
    prompt and response together are cut to `most_tokens`.
    """
    texts = [text.numpy() for text in batch.tokens.split(batch.seq_lens.tolist())]
    lens = batch.prompt_lens.tolist()
    prompts = [text[:n] for text, n in zip(texts, lens, strict=True)]
    responses = [text[n:] for text, n in zip(texts, lens, strict=True)]
    whose = list(range(batch.num_samples)) if batch.rows is None else batch.rows.tolist()
    moved = [responses[_next_other(whose, i)] for i in range(batch.num_samples)]
    cut = [response[: most_tokens - len(prompt)] for prompt, response in zip(prompts, moved, strict=True)]
    seen = {"image_counts": batch.image_counts, "images": batch.images}
    return Rollout.of(batch.step, prompts, cut, rows=batch.rows, **seen)


def _next_other(whose: Sequence[int], i: int) -> int:
    """Returns the next place after i, wrapping around, whose number differs from i's; the next one if all are the
    same.
    """
    places = [*range(i + 1, len(whose)), *range(i)]
    return next((j for j in places if whose[j] != whose[i]), places[0] if places else i)


def preference_notes(key: str, data: PreferenceDataset) -> Iterator[str]:
    """Yields one sentence for each correction, dropped row or truncation. key: configuration key of the sources"""
    cfg = data.cfg
    yield from [*data.tokenizer.notes, *(data.tokenizer.turn_notes() if cfg.chat_template else [])]
    yield from end_notes(key, data.end_tokens, data.tokenizer)
    for source in data.sources:
        place = key if len(data.sources) == 1 else f"{key}, {source.source.path}"
        for count, what in (
            *_left_out(source, cfg),
            (source.cut_prompt, f"with a prompt truncated to {cfg.max_prompt_tokens} tokens"),
            (source.cut, f"with a response truncated to {cfg.max_tokens} tokens with its prompt: it has no end token"),
            (source.merged, _said_of_merged(source)),
            (source.endless, "without an end token from the chat template: the model does not learn to stop"),
            (sum((row.margin or 0) < 0 for row in source.kept), f"with a {cfg.margin_key} below 0"),
        ):
            if count:
                yield f"{place}: {count} {noun(data.form)} {what}"
        yield from row_notes(place, source, cfg.chat_template)


def noun(form: Form) -> str:
    """Returns the noun for a row's contents in a batch."""
    return {
        "pairs": "pairs",
        "lists": "ranked lists",
        "labels": "responses with a label",
        "scores": "responses with a score",
        "steps": "solutions in steps",
    }[form]


def _left_out(source: PreferenceSource, cfg: PreferenceDataConfig) -> list[tuple[int, str]]:
    limits = f"data.max_prompt_tokens={cfg.max_prompt_tokens} or data.max_tokens={cfg.max_tokens}"
    return [
        (source.long_prompt, f"left out: their prompt does not fit into {limits}"),
        (source.long_response, f"left out: a response does not fit into data.max_tokens={cfg.max_tokens}"),
        (source.same, "left out: two responses are equal"),
        (source.tied, "left out: the responses have the same rank"),
    ]


def _said_of_merged(source: PreferenceSource) -> str:
    return (
        "whose prompt is tokenized differently once a response follows it: the tokens that differ, at most "
        f"{source.most_merged}, count as the response's"
    )
