"""Rows of preferences as they are written -> what is tokenised of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mrl.config.schema import PreferenceDataConfig
from mrl.data.encoder import Dressed, Encoder
from mrl.data.rows import Row, RowReader, content_problem, missing


@dataclass(frozen=True)
class Compared:
    """prompt: None where the responses begin with it; wholes: prompt and response, of each; label: of the only one."""

    prompt: Dressed | None
    wholes: tuple[Dressed, ...]
    label: bool | None
    source: str | None


@dataclass(frozen=True)
class PreferenceReader:
    """has_labels: rows of single responses with a label, not of pairs."""

    cfg: PreferenceDataConfig
    has_labels: bool

    @property
    def response_keys(self) -> dict[str, str]:
        """The settings that name a row's responses -> the names."""
        cfg = self.cfg
        if self.has_labels:
            return {"completion_key": cfg.completion_key}
        return {"chosen_key": cfg.chosen_key, "rejected_key": cfg.rejected_key}

    def read(self, row: Row, source_name: str | None) -> Row:
        """The completed row. Raises ValueError, which says why it cannot be used."""
        cfg, row = self.cfg, RowReader(self.cfg).complete(row, source_name)
        needed = dict(self.response_keys)
        if self.has_labels:
            needed |= {"prompt_key": cfg.prompt_key, "label_key": cfg.label_key}
        for setting, key in needed.items():
            if row.get(key) is None:
                raise ValueError(missing(row, key, f"data.{setting}"))
        has_prompt = row.get(cfg.prompt_key) is not None
        for key in (*self.response_keys.values(), *[cfg.prompt_key] * has_prompt):
            if problem := content_problem(row[key], key, cfg.chat_template):
                raise ValueError(problem)
        if not has_prompt and len({type(row[key]) for key in self.response_keys.values()}) > 1:
            raise ValueError("one of the two conversations is text, the other a list of messages")
        if self.has_labels and row[cfg.label_key] not in (True, False):
            raise ValueError(f"{cfg.label_key!r} must be true or false, not {row[cfg.label_key]!r}")
        return row

    def dressed(self, row: Row, encoder: Encoder) -> Compared:
        """What is tokenised of a row that `read` gives. Raises ValueError for a conversation that the chat template
        refuses, or two of them that begin with different messages."""
        cfg, responses = self.cfg, [row[key] for key in self.response_keys.values()]
        label = bool(row[cfg.label_key]) if self.has_labels else None
        prompt = row.get(cfg.prompt_key)
        if prompt is None and isinstance(responses[0], list):
            shared = common_start(*responses)
            shared = min(shared, *(len(messages) - 1 for messages in responses))
            if shared < 1:
                raise ValueError("without a prompt, both conversations must begin with the same messages")
            prompt, responses = responses[0][:shared], [messages[shared:] for messages in responses]
        start = None if prompt is None else encoder.dressed({cfg.prompt_key: prompt})
        if cfg.chat_template and prompt is not None:
            before = as_messages(prompt, "user")
            wholes = [encoder.whole([*before, *as_messages(response, "assistant")]) for response in responses]
        else:
            wholes = [encoder.text_of((prompt or "") + response) for response in responses]
        return Compared(start, tuple(wholes), label, row.get(cfg.data_source_key))


def as_messages(value: Any, role: str) -> list[Row]:
    """Text as a message of that role; messages as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def common_start(*lists: Sequence[Any]) -> int:
    """How many first items are the same in all."""
    shortest = min(map(len, lists))
    return next((i for i in range(shortest) if any(each[i] != lists[0][i] for each in lists)), shortest)
