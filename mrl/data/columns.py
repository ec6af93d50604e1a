"""Meaning of a row's columns. Every trainer reads columns here, so that a row gives the same prompt to all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrl import strict_json
from mrl.config.schema import DataConfig, PreferenceDataConfig, SFTDataConfig
from mrl.data.image_prompts import split_at_images
from mrl.data.rows import Row, value_at
from mrl.data.tokenizer import CLOCK

RESERVED_TEMPLATE_VARIABLES = {
    "messages", "conversation", "tools", "tokenize", "add_generation_prompt", "continue_final_message", CLOCK
}  # fmt: skip
WEIGHT = "weight"  # of a message, and the usual name of a row's


def conversation(value: Any, row: Row, cfg: DataConfig, pictures: int | None = None) -> list[Row]:
    """Returns the messages of a row, from text or messages: its system message first, its images in their places.

    Args:
        value: the prompt, or a whole conversation.
        pictures: number of images of the row; None for a text-only model.

    Raises:
        ValueError: for a second system message, or if the number of image placeholders is not the number of images.
    """
    messages = messages_of(value)
    text = row.get(cfg.system_key) if cfg.system_key is not None else None
    if text is not None and text != "":
        other = "set data.system_key to another column, or to null for none"
        if not isinstance(text, str):
            raise ValueError(f"{cfg.system_key!r} must be text, not {type(text).__name__}: {other}")
        if messages and messages[0].get("role") == "system":
            raise ValueError(f"{cfg.system_key!r} is a system message, and the prompt begins with one too: {other}")
        messages = [{"role": "system", "content": text}, *messages]
    return split_at_images(messages, pictures)


def read_template_variables(row: Row, cfg: DataConfig) -> Row:
    """Returns the variables of the chat template besides the messages: `tools`, and the row's own variables.

    Raises:
        ValueError: for `tools` or variables of the wrong type, or variables that mrl sets itself.
    """
    tools = row.get(cfg.tools_key) if cfg.tools_key is not None else None
    more = row.get(cfg.chat_template_kwargs_key) if cfg.chat_template_kwargs_key is not None else None
    other = "set data.{} to another column, or to null for none"
    if isinstance(tools, str):
        try:
            tools = strict_json.loads(tools) if tools else None
        except ValueError as error:
            problem = f"{cfg.tools_key!r} is text, but not JSON ({error})"
            raise ValueError(f"{problem}: {other.format('tools_key')}") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{cfg.tools_key!r} must be a list of objects, or its JSON: {other.format('tools_key')}")
    if more is not None and not isinstance(more, dict):
        kind = type(more).__name__
        raise ValueError(
            f"{cfg.chat_template_kwargs_key!r} must be an object, not {kind}: "
            + other.format("chat_template_kwargs_key")
        )
    if more and (own := sorted(RESERVED_TEMPLATE_VARIABLES & more.keys())):
        raise ValueError(f"{cfg.chat_template_kwargs_key!r} has {', '.join(own)}, which mrl sets itself: remove it")
    return ({"tools": without_nulls(tools)} if tools else {}) | {k: v for k, v in (more or {}).items() if v is not None}


def unused_columns(row: Row, cfg: DataConfig, sees_pictures: bool, margins: bool = False) -> Iterator[tuple[str, str]]:
    """Yields (column, why) for each column that mrl knows and that has a value here, but has no effect in this run."""
    weighs, is_text = isinstance(cfg, SFTDataConfig), isinstance(cfg, SFTDataConfig) and cfg.form == "text"
    if not cfg.chat_template or is_text:
        why = "plain texts use no chat template" if is_text else "data.chat_template is false"
        for key in (cfg.system_key, cfg.tools_key, cfg.chat_template_kwargs_key):
            if key is not None and row.get(key):
                yield key, why
    if not sees_pictures and value_at(row, cfg.images_key):
        yield cfg.images_key, "this model with this trainer reads no images"
    if row.get(WEIGHT) is not None and not (isinstance(cfg, SFTDataConfig) and cfg.weight_key is not None):
        yield WEIGHT, f"set data.weight_key: {WEIGHT} to use it" if weighs else "only trainer: sft uses row weights"
    if not weighs and _weighs_messages(row.get(cfg.prompt_key)):
        yield f"{cfg.prompt_key}[].{WEIGHT}", "only trainer: sft uses message weights"
    if isinstance(cfg, PreferenceDataConfig) and not margins and row.get(cfg.margin_key) is not None:
        yield cfg.margin_key, "the loss of this run uses no margin"


def named_columns(cfg: DataConfig) -> dict[str, str]:
    """Returns setting -> column for the columns that rows may lack and that the configuration names itself."""
    names = ("answer_key", "system_key", "tools_key", "chat_template_kwargs_key", "data_source_key", "images_key",
             "weight_key")  # fmt: skip
    own = [name for name in names if name in type(cfg).model_fields and dict(cfg)[name] is not None]
    return {name: dict(cfg)[name] for name in own if dict(cfg)[name] != type(cfg).model_fields[name].default}


def _weighs_messages(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, dict) and each.get(WEIGHT) is not None for each in value)


def unused_column_notes(place: str, counts: dict[tuple[str, str], int]) -> Iterator[str]:
    """Yields one sentence a column. place: name of the rows; counts: number of rows by the pairs that `unused_columns`
    yields.
    """
    for (column, why), count in sorted(counts.items()):
        yield f"{place}: {count} rows have {column!r}, which has no effect: {why}"


def messages_of(value: Any) -> list[Row]:
    """Returns messages, from text or messages, without null keys: a table gives every message the keys of all messages,
    and chat templates would take the nulls for values.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [{key: part for key, part in m.items() if part is not None or key == "content"} for m in value]


def without_nulls(value: Any) -> Any:
    """Returns the value without keys that are null: a table's rows have every key of all rows."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value
