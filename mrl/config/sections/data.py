"""Data and batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer

from mrl.config.sections.base import PositiveFloat, PositiveInt, Section


class SourceConfig(Section):
    """Rows in one place: FILE.jsonl, FILE.json (a list of objects), FILE.parquet, or a directory that the `datasets`
    library has saved (`save_to_disk`) or would load (data files as on the Hugging Face hub)."""

    path: str
    split: str | None = None  # of a directory; needed where it has several
    name: str | None = None  # what data_source_key holds, in rows that have none of their own
    weight: PositiveFloat | None = None  # share of the prompts, by weight; null for all: each row once an epoch


def _listed(value: Any) -> Any:
    """`a.jsonl` and `{path: a.jsonl}` are lists of one."""
    items = value if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(item, str | dict | SourceConfig) for item in items):
        raise ValueError("must be a path, a section or a list of them")
    return tuple({"path": item} if isinstance(item, str) else item for item in items)


def _short(sources: tuple[SourceConfig, ...]) -> Any:
    """As a person would write it: only what is set, a single path by itself."""
    items = [source.model_dump(exclude_none=True) for source in sources]
    texts = [item["path"] if item.keys() == {"path"} else item for item in items]
    return texts[0] if len(texts) == 1 else texts


Sources = Annotated[tuple[SourceConfig, ...], BeforeValidator(_listed), PlainSerializer(_short, when_used="json")]


class DataConfig(Section):
    """Where prompts come from. Sources are a path, a mapping (`SourceConfig`), or a list of either.

    `prompt_key` holds text, or with `chat_template` also a list of chat messages (text is then one user message). A key
    with dots that a row lacks reaches into it: `reward_model.ground_truth`.
    """

    train: Sources
    validation: Sources | None = None
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    data_source_key: str = "data_source"
    chat_template: bool = False
    max_prompt_tokens: PositiveInt = 1024
    truncation: Literal["drop", "left", "right", "middle", "error"] = "drop"  # longer prompts: left out, or cut there
    shuffle: bool = True


class BatchConfig(Section):
    prompts_per_step: PositiveInt
    samples_per_prompt: PositiveInt = 1
    samples_per_minibatch: PositiveInt | None = None  # all samples of the step when null
    epochs_per_step: PositiveInt = 1


class SFTBatchConfig(Section):
    samples_per_step: PositiveInt
