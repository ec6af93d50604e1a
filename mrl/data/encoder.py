"""A row -> the tokens of its prompt, or what is wrong with it."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from mrl.config.schema import DataConfig
from mrl.data.errors import DataError
from mrl.data.tokenizer import Tokenizer


class Encoder:
    """What the data section says about rows. Raises DataError where a chat template is asked for and there is none."""

    def __init__(self, cfg: DataConfig, tokenizer: Tokenizer) -> None:
        if cfg.chat_template and not tokenizer.has_chat_template:
            raise DataError("data.chat_template is true but the tokenizer has no chat template; set it to false")
        self.cfg, self.tokenizer = cfg, tokenizer

    def complete(self, row: dict[str, Any], source_name: str | None) -> dict[str, Any]:
        """The row with what it holds elsewhere: values that a key with dots reaches, the name of its source."""
        cfg, found = self.cfg, dict(row)
        for key in (cfg.prompt_key, cfg.answer_key, cfg.data_source_key):
            value: Any = row
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None and key not in found:
                found[key] = value
        if source_name is not None and found.get(cfg.data_source_key) is None:
            found[cfg.data_source_key] = source_name
        return found

    def problem(self, row: dict[str, Any], require_answer: bool) -> str | None:
        """Why a completed row cannot be used."""
        found = _prompt_problem(row, self.cfg.prompt_key, self.cfg.chat_template)
        return found or (self.answer_problem(row) if require_answer else None)

    def answer_problem(self, row: dict[str, Any]) -> str | None:
        key = self.cfg.answer_key
        if key not in row:
            return _missing(row, key, "data.answer_key")
        return None if isinstance(row[key], str) else f"{key!r} must be text, not {type(row[key]).__name__}"

    def text(self, row: dict[str, Any]) -> str:
        """What is tokenised. Raises ValueError for a conversation that the chat template refuses."""
        value = row[self.cfg.prompt_key]
        if not self.cfg.chat_template:
            text: str = value
            return text
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else [_message(m) for m in value]
        try:
            return self.tokenizer.dress(messages)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses it: {error}") from error

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Whole prompts, of any length."""
        return self.tokenizer.encode_plain(texts) if self.cfg.chat_template else self.tokenizer.encode_prompts(texts)

    def cut(self, ids: list[int]) -> list[int]:
        """data.max_prompt_tokens of more ids, special ones not spared: "left" keeps the end, "right" the beginning,
        "middle" both, the end the larger half."""
        limit = self.cfg.max_prompt_tokens
        head = {"left": 0, "middle": limit // 2, "right": limit}[self.cfg.truncation]
        return [*ids[:head], *ids[len(ids) - limit + head :]]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Tables give every message the keys of all, as nulls, which chat templates would take for values."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _missing(row: dict[str, Any], key: str, setting: str) -> str:
    return f"no key {key!r} ({setting}); the row has: {', '.join(map(repr, row)) or 'nothing'}"


def _prompt_problem(row: dict[str, Any], key: str, chat: bool) -> str | None:
    if key not in row:
        return _missing(row, key, "data.prompt_key")
    value = row[key]
    if isinstance(value, str):
        return None
    if not chat:
        hint = "; chat messages need data.chat_template: true" if isinstance(value, list) else ""
        return f"{key!r} must be text, not {type(value).__name__}{hint}"
    messages = isinstance(value, list) and value and all(isinstance(m, dict) for m in value)
    if messages and all({"role", "content"} <= message.keys() for message in value):
        return None
    return f"{key!r} must be text or a list of messages with 'role' and 'content'"
