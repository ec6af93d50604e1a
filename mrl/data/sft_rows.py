"""Rows to imitate as they are written -> what is tokenised of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mrl.config.schema import SFTDataConfig
from mrl.data.columns import WEIGHT, conversation, told
from mrl.data.encoder import Dressed, Encoder
from mrl.data.rows import Row, completed, content_problem, missing, named
from mrl.data.sources import Rows
from mrl.data.turns import Conversation, Turns


@dataclass(frozen=True)
class Imitated:
    """What a row becomes: a prompt with an answer, a conversation, or a text.

    weight: of each of its tokens; source: what it says of its kind
    """

    weight: float
    source: str | None
    prompt: Dressed | None = None
    answer: str | None = None
    conversation: Conversation | None = None
    text: Dressed | None = None


@dataclass(frozen=True)
class SFTReader:
    """What a row must be, by `cfg.form`."""

    cfg: SFTDataConfig
    margins = False

    def read(self, rows: Rows, i: int, source_name: str | None) -> Row:
        """The completed row. Raises ValueError, which says why it cannot be used."""
        cfg, needed = self.cfg, self.cfg.needed_keys()
        row = named(completed(rows[i], cfg, source_name), cfg.data_source_key)
        for setting, key in needed.items():
            if row.get(key) is None:
                raise ValueError(missing(row, key, f"data.{setting}"))
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

    def dressed(self, row: Row, turns: Turns) -> Imitated:
        """What is tokenised of a row that `read` gives. Raises ValueError for a conversation that the chat template
        refuses, or of whose turns it does not tell where they are."""
        cfg, encoder = self.cfg, turns.encoder
        weight = weight_of(row, cfg.weight_key) if cfg.weight_key is not None else 1.0
        source = row.get(cfg.data_source_key)
        if cfg.form == "text":
            return Imitated(weight, source, text=encoder.text_of(row[cfg.text_key]))
        if cfg.form == "messages":
            said = conversation(row[cfg.messages_key], row, cfg)
            return Imitated(weight, source, conversation=_turns(turns, said, 0, told(row, cfg)))
        answer = row[cfg.answer_key]
        if isinstance(answer, str):
            return Imitated(weight, source, encoder.dressed(row, with_answer=True), answer)
        before = encoder.messages(row)
        said = [*before, *answer]
        return Imitated(weight, source, conversation=_turns(turns, said, len(before), told(row, cfg)))


def _turns(turns: Turns, messages: list[Row], first: int, more: Row) -> Conversation:
    """first: number of the first message whose turn may be learnt"""
    weights = [weight_of(message, WEIGHT) for message in messages]
    said = [{key: value for key, value in message.items() if key != WEIGHT} for message in messages]
    return turns.conversation(said, [0.0] * first + weights[first:], more)


def weight_of(row: Row, key: str) -> float:
    """What the row or message counts; 1 where it does not say. Raises ValueError for what is no number from 0 on."""
    value = row.get(key)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{key!r} must be a number of at least 0, not {value!r}")
    return float(value)


def encoded(encoder: Encoder, rows: list[Imitated]) -> list[tuple[list[int] | None, list[int]]]:
    """(prompt, all that follows it) of each, with EOS where mrl puts one; a conversation's or text's prompt is None."""
    prompts = iter(encoder.ids([row.prompt for row in rows if row.prompt is not None]))
    answers = iter(encoder.answers([row.answer for row in rows if row.answer is not None]))
    texts = iter(encoder.tokenizer.encode_prompts([row.text.text for row in rows if row.text is not None]))
    ended = encoder.tokenizer.ended
    found: list[tuple[list[int] | None, list[int]]] = []
    for row in rows:
        if row.conversation is not None:
            found.append((None, row.conversation.ids))
        elif row.text is not None:
            found.append((None, ended(next(texts))))
        else:
            found.append((next(prompts), ended(next(answers))))
    return found
