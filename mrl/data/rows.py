"""Rows in the form that the data section and the reward require, before anything is tokenised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mrl.config.problems import shortened
from mrl.config.schema import DataConfig
from mrl.config.trainers.base import DataUse
from mrl.data.sources import Rows

Row = dict[str, Any]
RowCheck = Callable[[Row], str | None]  # why a completed row cannot be used


def train_check(use: DataUse, check: RowCheck | None) -> RowCheck | None:
    """Returns the check of rows of `train`: `check`, and that their data source is one of `use.sources`."""

    def known(row: Row) -> str | None:
        source, key = row.get(use.cfg.data_source_key), use.cfg.data_source_key
        if str(source) not in use.sources:
            return f"{key!r} is {source!r}, which has no teacher in teacher.teachers: add one, or leave the row out"
        return None if check is None else check(row)

    return known if use.sources else check


class Reader(Protocol):
    """Reader of rows: completes and checks each row."""

    @property
    def cfg(self) -> DataConfig: ...

    @property
    def margins(self) -> bool:
        """True if every row has a margin."""
        ...

    def read(self, rows: Rows, i: int, source_name: str | None) -> Row:
        """Returns the completed row. Raises ValueError, which says why the row cannot be used."""
        ...


@dataclass(frozen=True)
class RowReader:
    """Reader of prompt rows. cfg: names of the columns. require_answer: as text. check: further demands, such as the
    reward's.
    """

    cfg: DataConfig
    require_answer: bool = False
    check: RowCheck | None = None
    margins = False

    def read(self, rows: Rows, i: int, source_name: str | None) -> Row:
        """Returns the completed row. Raises ValueError, which says why the row cannot be used."""
        row = self.complete(rows[i], source_name)
        problem = _prompt_problem(row, self.cfg.prompt_key, self.cfg.chat_template)
        if problem is None and self.require_answer:
            problem = self.answer_problem(row)
        if problem is None and self.check is not None:
            problem = self.check(row)
        if problem is not None:
            raise ValueError(problem)
        return row

    def complete(self, row: Row, source_name: str | None) -> Row:
        """Returns the row completed as by `complete_row`, without image bytes."""
        found = complete_row(row, self.cfg, source_name)
        return _without_pixels(found, self.cfg.images_key)

    def answer_problem(self, row: Row) -> str | None:
        """Returns the reason why the row has no answer to train on; None if it has one."""
        key = self.cfg.answer_key
        if key not in row:
            return missing_key_problem(row, key, "data.answer_key")
        return None if isinstance(row[key], str) else f"{key!r} must be text, not {type(row[key]).__name__}"


def complete_row(row: Row, cfg: DataConfig, source_name: str | None) -> Row:
    """Returns the row with values that a dotted key reaches, and the name of its source. Images stay where they are."""
    found = dict(row)
    for setting, key in cfg:
        if not setting.endswith("_key") or key is None or setting == "images_key":
            continue
        if key not in found and (value := value_at(row, key)) is not None:
            found[key] = value
    if source_name is not None and found.get(cfg.data_source_key) is None:
        found[cfg.data_source_key] = source_name
    return found


def with_data_source(row: Row, key: str) -> Row:
    """Returns the row with its data source, under `key`, as text. Raises ValueError if it is neither text nor a
    number.
    """
    kind = row.get(key)
    if kind is None or isinstance(kind, str):
        return row
    if not isinstance(kind, int | float):
        raise ValueError(f"{key!r} (data.data_source_key) must be text or a number, not {type(kind).__name__}")
    return {**row, key: str(kind)}


def value_at(row: Row, key: str) -> Any:
    """Returns the value under `key`, or under a dotted key's path if the row lacks the key itself; None if there is
    none.
    """
    first, _, rest = key.partition(".")
    if key in row or not rest:
        return row.get(key)
    return value_at(inner, rest) if isinstance(inner := row.get(first), dict) else None


def _without_pixels(row: Row, key: str) -> Row:
    """Replaces image bytes under `key` by image numbers: rows are passed to rewards and written to files."""
    first, _, rest = key.partition(".")
    if key not in row and rest and isinstance(inner := row.get(first), dict):
        return {**row, first: _without_pixels(inner, rest)}
    value = row.get(key)
    values = value if isinstance(value, list) else [value]
    plain = [{"image": number} if _is_stored(each) else each for number, each in enumerate(values)]
    return row if plain == values else {**row, key: plain if isinstance(value, list) else plain[0]}


def _is_stored(value: Any) -> bool:
    if isinstance(value, dict):
        return isinstance(value.get("bytes"), bytes)
    return isinstance(value, bytes) or (isinstance(value, str) and value.startswith("data:"))


def missing_key_problem(row: Row, key: str, setting: str) -> str:
    """Returns the message for a row without the key that `setting` names."""
    return f"no key {key!r} ({setting}); the row has: {', '.join(map(repr, row)) or 'nothing'}"


def _prompt_problem(row: Row, key: str, chat: bool) -> str | None:
    if key not in row:
        return missing_key_problem(row, key, "data.prompt_key")
    return content_problem(row[key], key, chat)


def content_problem(value: Any, key: str, chat: bool) -> str | None:
    """Returns the reason why a value is neither text nor, with a chat template, messages; None if it is."""
    if isinstance(value, str):
        return None
    if not chat:
        hint = "; chat messages need data.chat_template: true" if isinstance(value, list) else ""
        return f"{key!r} must be text, not {type(value).__name__}{hint}"
    messages = isinstance(value, list) and value and all(isinstance(m, dict) for m in value)
    if messages and all({"role", "content"} <= message.keys() for message in value):
        wrong = next((repr(message["content"]) for message in value if not _is_said(message)), None)
        return wrong and f"a message of {key!r} has the 'content' {shortened(wrong)}, which is not text"
    return f"{key!r} must be text or a list of messages with 'role' and 'content'"


def _is_said(message: Row) -> bool:
    """Returns True for valid message content: text, parts, or nothing beside tool calls."""
    content = message["content"]
    if isinstance(content, list):
        return all(isinstance(part, dict) for part in content)
    return isinstance(content, str) or (content is None and bool(message.get("tool_calls")))
