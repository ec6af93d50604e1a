"""What a row tells the chat template besides its messages."""

from __future__ import annotations

from typing import Any

from mrl import strict_json
from mrl.data.rows import Row
from mrl.data.tokenizer import CLOCK

GIVEN_BY_US = {
    "messages", "conversation", "tools", "tokenize", "add_generation_prompt", "continue_final_message", CLOCK
}  # fmt: skip


def told(row: Row, tools_key: str | None, kwargs_key: str | None) -> Row:
    """What the chat template is told besides the messages: `tools`, and the row's own keys. Raises ValueError for what
    it cannot be told."""
    tools = row.get(tools_key) if tools_key is not None else None
    more = row.get(kwargs_key) if kwargs_key is not None else None
    if isinstance(tools, str):
        try:
            tools = strict_json.loads(tools)
        except ValueError as error:
            raise ValueError(f"{tools_key!r} is text that is no JSON: {error}") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{tools_key!r} must be a list of objects, or JSON of one")
    if more is not None and not isinstance(more, dict):
        raise ValueError(f"{kwargs_key!r} must be an object, not {type(more).__name__}")
    if more and (own := sorted(GIVEN_BY_US & more.keys())):
        raise ValueError(f"{kwargs_key!r} has {', '.join(own)}, which mrl says itself")
    return ({"tools": without_nulls(tools)} if tools else {}) | {k: v for k, v in (more or {}).items() if v is not None}


def without_nulls(value: Any) -> Any:
    """The value without keys that are null: a table's rows have every key of all rows."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value
