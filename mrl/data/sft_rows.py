"""Rows of supervised fine-tuning: from the row as written to the texts that are tokenised."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mrl.config.schema import SFTDataConfig
from mrl.data.columns import WEIGHT, conversation, read_template_variables
from mrl.data.encoder import Encoder, RenderedPrompt
from mrl.data.rows import Row, complete_row, content_problem, missing_key_problem, with_data_source
from mrl.data.sources import Rows
from mrl.data.turns import AssistantTurns, Conversation


@dataclass(frozen=True)
class RenderedSFTRow:
    """Content of a row: a prompt with an answer, a conversation, or a text.

    weight: loss weight of each of its tokens; source: the row's data source
    """

    weight: float
    source: str | None
    prompt: RenderedPrompt | None = None
    answer: str | None = None
    conversation: Conversation | None = None
    text: RenderedPrompt | None = None


@dataclass(frozen=True)
class SFTReader:
    """Reader of rows of supervised fine-tuning, by `cfg.form`."""

    cfg: SFTDataConfig
    margins = False

    def read(self, rows: Rows, i: int, source_name: str | None) -> Row:
        """Returns the completed row. Raises ValueError, which says why the row cannot be used."""
        cfg, needed = self.cfg, self.cfg.needed_keys()
        row = with_data_source(complete_row(rows[i], cfg, source_name), cfg.data_source_key)
        for setting, key in needed.items():
            if row.get(key) is None:
                raise ValueError(missing_key_problem(row, key, f"data.{setting}"))
            if problem := self._problem(row[key], key):
                raise ValueError(problem)
        if cfg.weight_key is not None:
            weight_of(row, cfg.weight_key)
        return row

    def _problem(self, value: Any, key: str) -> str | None:
        cfg = self.cfg
        if cfg.form == "messages" and isinstance(value, str):
            return f"{key!r} must be a list of messages, not text"
        problem = content_problem(value, key, cfg.chat_template and cfg.form != "text")
        if problem is None and isinstance(value, list):
            for message in value:
                weight_of(message, WEIGHT)
        return problem

    def render(self, row: Row, turns: AssistantTurns) -> RenderedSFTRow:
        """Returns the texts to tokenise of a row that `read` returned. Raises ValueError for a conversation that the
        chat template refuses, or whose turns cannot be located.
        """
        cfg, encoder = self.cfg, turns.encoder
        weight = weight_of(row, cfg.weight_key) if cfg.weight_key is not None else 1.0
        source = row.get(cfg.data_source_key)
        if cfg.form == "text":
            return RenderedSFTRow(weight, source, text=encoder.text_of(row[cfg.text_key]))
        if cfg.form == "messages":
            said = conversation(row[cfg.messages_key], row, cfg)
            return RenderedSFTRow(
                weight, source, conversation=_turns(turns, said, 0, read_template_variables(row, cfg))
            )
        answer = row[cfg.answer_key]
        if isinstance(answer, str):
            return RenderedSFTRow(weight, source, encoder.render(row, with_answer=True), answer)
        before = encoder.messages(row)
        said = [*before, *answer]
        return RenderedSFTRow(
            weight, source, conversation=_turns(turns, said, len(before), read_template_variables(row, cfg))
        )


def _turns(turns: AssistantTurns, messages: list[Row], first: int, template_variables: Row) -> Conversation:
    """Encodes a conversation. first: number of the first message whose turn may be trained on"""
    weights = [weight_of(message, WEIGHT) for message in messages]
    said = [{key: value for key, value in message.items() if key != WEIGHT} for message in messages]
    return turns.conversation(said, [0.0] * first + weights[first:], template_variables)


def weight_of(row: Row, key: str) -> float:
    """Returns the weight of a row or message; 1 if it has none. Raises ValueError unless it is a finite number >= 0."""
    value = row.get(key)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{key!r} must be a number of at least 0, not {value!r}")
    return float(value)


def encoded(encoder: Encoder, rows: list[RenderedSFTRow]) -> list[tuple[list[int] | None, list[int]]]:
    """Returns (prompt, all that follows it) of each row, with EOS where mrl adds one; the prompt of a conversation or
    text is None.
    """
    prompts = iter(encoder.ids([row.prompt for row in rows if row.prompt is not None]))
    answers = iter(encoder.answers([row.answer for row in rows if row.answer is not None]))
    texts = iter(encoder.tokenizer.encode_prompts([row.text.text for row in rows if row.text is not None]))
    with_eos = encoder.tokenizer.with_eos
    found: list[tuple[list[int] | None, list[int]]] = []
    for row in rows:
        if row.conversation is not None:
            found.append((None, row.conversation.ids))
        elif row.text is not None:
            found.append((None, with_eos(next(texts))))
        else:
            found.append((next(prompts), with_eos(next(answers))))
    return found
