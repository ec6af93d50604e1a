"""Prompts of one or several sources. A step's prompts depend on (seed, step) alone: there is no state to save."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mrl.config.schema import DataConfig, SourceConfig
from mrl.core import Prompt, Rollout
from mrl.data.columns import unused_column_notes
from mrl.data.encoded_rows import EncodedSource
from mrl.data.encoder import Encoder
from mrl.data.errors import DataError, raise_for
from mrl.data.mixture import Mixture
from mrl.data.row_sampler import RowSampler
from mrl.data.rows import RowCheck, RowReader
from mrl.data.source import PromptSource
from mrl.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mrl.data.image_processor import ImageProcessor


class PromptDataset:
    """The rows of all sources, tokenised.

    Prompts with more than `cfg.max_prompt_tokens` tokens are dropped or truncated, as `cfg.truncation` says; each
    source counts them. `Prompt.index` is the row's number over all sources, one after the other (from 0, blank lines
    not counted, dropped rows counted).

    Args:
        sources: sources of a configuration, or the path of the only one.
        image_processor: image processor of a vision-language model.
        rows_before: rows of other data sets, whose images are numbered before these.

    Raises DataError for malformed rows, missing keys, empty prompts, and a source without usable rows; with
    `require_answer` also for rows without a text under `cfg.answer_key`; with `check` for rows that it refuses.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig] | str | Path,
        cfg: DataConfig,
        tokenizer: Tokenizer,
        require_answer: bool = False,
        check: RowCheck | None = None,
        image_processor: ImageProcessor | None = None,
        rows_before: int = 0,
    ) -> None:
        if isinstance(sources, str | Path):
            sources = (SourceConfig(path=str(sources)),)
        self.cfg = cfg
        self.tokenizer, self.image_processor = tokenizer, image_processor
        self._encoder, self._rows_before = Encoder(cfg, tokenizer, image_processor), rows_before
        self._reader = RowReader(cfg, require_answer, check)
        self.sources: list[PromptSource] = []
        for source in sources:
            first = sum(len(found.rows) for found in self.sources)
            self.sources.append(PromptSource(source, self._encoder, self._reader, first))
            if not self.sources[-1]:
                limit = f"data.max_prompt_tokens={cfg.max_prompt_tokens}"
                raise DataError(f"{source.path}: all {self.sources[-1].dropped} prompts have more than {limit} tokens")
        self._order = RowSampler(sources, [len(source) for source in self.sources], cfg.shuffle)

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    @property
    def mixture(self) -> Mixture:
        """Mixture of the sources."""
        return self._order.mixture

    def prompts_for_step(self, step: int, n: int, seed: int) -> list[Prompt]:
        """Returns the n prompts of step `step` (from 0), in the order of `RowSampler.of_step`. Raises ValueError for a
        negative step.
        """
        return [self._prompt(source, place) for source, place in self._order.of_step(step, n, seed)]

    def first(self, n: int | None) -> list[Prompt]:
        """Returns the first n prompts in row order (all if there are fewer, or n is None), round-robin over several
        sources: every validation gets the same prompts.
        """
        return [self._prompt(source, place) for source, place in self._order.first(len(self) if n is None else n)]

    def _prompt(self, source: int, place: int) -> Prompt:
        found = self.sources[source].prompt(place)
        return replace(found, picture_row=found.index + self._rows_before) if found.images else found

    def where(self, prompt: Prompt) -> str:
        """Returns file and row, for messages."""
        source = next(s for s in reversed(self.sources) if s.first_index <= prompt.index)
        return source.where(prompt.index)

    def answers(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Returns the tokens of each answer, with EOS at the end. Raises DataError for rows without an answer."""
        problems = [(self.where(p), what) for p in prompts if (what := self._reader.answer_problem(p.row))]
        raise_for(problems)
        plain = self._encoder.answers([p.row[self.cfg.answer_key] for p in prompts])
        return [self.tokenizer.with_eos(ids) for ids in plain]

    def sft_rollout(self, step: int, n: int, seed: int) -> Rollout:
        """Returns a step of supervised fine-tuning: n prompts, each with its answer + EOS as the response.

        Prompt and answer are tokenised separately, as in sampling. Scores and log-probs are zeros.
        """
        prompts = self.prompts_for_step(step, n, seed)
        answers = self.answers(prompts)
        rows = torch.tensor([p.index for p in prompts])
        return Rollout.of(step, [p.token_ids for p in prompts], answers, rows=rows)


def data_notes(tokenizer: Tokenizer, sets: Mapping[str, PromptDataset]) -> list[str]:
    """Returns one sentence for each correction, dropped row or truncation. `sets`: data sets by the key of their
    sources.
    """
    notes = [*tokenizer.notes]
    if any(data.cfg.chat_template for data in sets.values()):
        notes += tokenizer.turn_notes()
    return [*notes, *(note for key, data in sets.items() for note in _notes(key, data))]


def _notes(key: str, data: PromptDataset) -> Iterator[str]:
    limit = data.cfg.max_prompt_tokens
    for source in data.sources:
        place = key if len(data.sources) == 1 else f"{key}, {source.source.path}"
        if source.dropped:
            yield f"{place}: {source.dropped} prompts left out: longer than {limit} tokens (data.max_prompt_tokens)"
        if source.cut:
            ends = {"left": "at the beginning", "middle": "in the middle", "right": "at the end"}
            yield f"{place}: {source.cut} prompts truncated to {limit} tokens {ends[data.cfg.truncation]}"
        yield from row_notes(place, source, data.cfg.chat_template)


def end_notes(key: str, ends: Collection[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yields a note if responses are trained with end tokens other than EOS. ends: these end tokens"""
    if {*ends} - {tokenizer.eos_id}:
        names = " and ".join(repr(tokenizer.hf.convert_ids_to_tokens(token)) for token in sorted(ends))
        yield (
            f"{key}: the model learns to stop with {names}, and the EOS token is {tokenizer.hf.eos_token!r}: "
            "generation_config.json of exported weights lists all of them"
        )


def row_notes(place: str, source: PromptSource | EncodedSource[Any], is_chat: bool) -> Iterator[str]:
    """Yields notes on columns without effect and on control tokens in rows. place: name of the rows"""
    yield from unused_column_notes(place, source.unused_columns)
    if as_text := source.as_text:
        yield f"{place}: {_hold(as_text)}: tokenized as text, not as control tokens"
    if as_control := source.as_control:
        because = "cannot be told apart from the chat template's own" if is_chat else "the row is the whole prompt"
        yield f"{place}: {_hold(as_control)}: tokenized as control tokens ({because})"


def _hold(names: list[str]) -> str:
    return f"{len(names)} rows contain {' or '.join(sorted({*names})[:3])}"
