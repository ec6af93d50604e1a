"""Rows of preferences as they are written -> what is tokenised of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mrl.config.schema import PreferenceDataConfig
from mrl.data.encoder import Dressed, Encoder
from mrl.data.rows import Row, completed, content_problem, missing
from mrl.data.sources import Rows


@dataclass(frozen=True)
class Compared:
    """prompt: None where the responses begin with it; wholes: prompt and response, of each; label: of the only one."""

    prompt: Dressed | None
    wholes: tuple[Dressed, ...]
    label: bool | None
    source: str | None


@dataclass(frozen=True)
class PreferenceReader:
    """form: what a row is."""

    cfg: PreferenceDataConfig
    form: Literal["pairs", "labels"]

    def read(self, rows: Rows, i: int, source_name: str | None) -> Row:
        """The completed row. Raises ValueError, which says why it cannot be used."""
        cfg, responses = self.cfg, self.cfg.responses(self.form).values()
        row = completed(rows[i], cfg, (cfg.prompt_key, *cfg.needed(self.form).values()), source_name)
        for setting, key in cfg.needed(self.form).items():
            if row.get(key) is None:
                raise ValueError(missing(row, key, f"data.{setting}"))
        has_prompt = row.get(cfg.prompt_key) is not None
        for key in (*responses, *[cfg.prompt_key] * has_prompt):
            if problem := content_problem(row[key], key, cfg.chat_template):
                raise ValueError(problem)
        if not has_prompt and len({type(row[key]) for key in responses}) > 1:
            raise ValueError("one of the two conversations is text, the other a list of messages")
        if self.form == "labels" and row[cfg.label_key] not in (True, False):
            raise ValueError(f"{cfg.label_key!r} must be true or false, not {row[cfg.label_key]!r}")
        return row

    def dressed(self, row: Row, encoder: Encoder) -> Compared:
        """What is tokenised of a row that `read` gives. Raises ValueError for a conversation that the chat template
        refuses, or two of them that begin with different messages."""
        cfg, responses = self.cfg, [row[key] for key in self.cfg.responses(self.form).values()]
        label = bool(row[cfg.label_key]) if self.form == "labels" else None
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
