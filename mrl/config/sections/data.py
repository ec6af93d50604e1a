"""Data and batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from mrl.config.sections.base import PositiveFloat, PositiveInt, Section


class SourceConfig(Section):
    """Rows in one place: FILE.jsonl, FILE.json (a list of objects), FILE.parquet, or a directory that the `datasets`
    library has saved (`save_to_disk`) or would load (data files as on the Hugging Face hub)."""

    path: str  # file or directory
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


Sources = Annotated[
    tuple[SourceConfig, ...],
    Field(description="path | section | [path or section, ...]"),
    BeforeValidator(_listed),
    PlainSerializer(_short, when_used="json"),
]


class DataConfig(Section):
    """Where prompts come from. Sources are a path, a section that has one, or a list of either.

    `prompt_key` holds text, or with `chat_template` also a list of chat messages (text is then one user message). A key
    with dots that a row lacks reaches into it: `reward_model.ground_truth`.

    With `chat_template` the names of control tokens in a row ("<|im_start|>") are text to the model; without, a row is
    the whole prompt, and they are the tokens.
    """

    train: Sources  # what is learnt from
    validation: Sources | None = None  # held-out prompts; null: no validation
    prompt_key: str = "prompt"  # where a row has its prompt
    answer_key: str = "answer"  # where a row has what the reward, or sft, takes as the answer
    # where a row says its kind, by which reward.functions and reward.recipe choose
    data_source_key: str = "data_source"
    chat_template: bool = False  # put prompts into the tokenizer's chat template
    max_prompt_tokens: PositiveInt = 1024  # tokens of a prompt, chat template included
    # longer prompts: left out, cut there, or the run ends
    truncation: Literal["drop", "left", "right", "middle", "error"] = "drop"
    shuffle: bool = True  # every epoch in an order of its own, by run.seed


class PreferenceDataConfig(DataConfig):
    """Where pairs, or responses with a label, come from.

    A pair has `chosen_key` and `rejected_key`; without `prompt_key` both are whole texts or conversations, whose common
    beginning is the prompt. A response with a label has `prompt_key`, `completion_key` and `label_key`. Text gets one
    EOS at its end, a conversation what the chat template ends its last turn with.
    """

    chosen_key: str = "chosen"  # the better response: text, or with chat_template messages too
    rejected_key: str = "rejected"  # the worse response
    completion_key: str = "completion"  # the only response
    label_key: str = "label"  # whether that is a good one: true or false
    max_tokens: PositiveInt = 2048  # tokens of prompt and response; longer responses are cut at their end

    def responses(self, form: Literal["pairs", "labels"]) -> dict[str, str]:
        """The settings that name a row's responses -> the names."""
        if form == "labels":
            return {"completion_key": self.completion_key}
        return {"chosen_key": self.chosen_key, "rejected_key": self.rejected_key}

    def needed(self, form: Literal["pairs", "labels"]) -> dict[str, str]:
        """The settings that name what every row has -> the names."""
        others = {"prompt_key": self.prompt_key, "label_key": self.label_key} if form == "labels" else {}
        return self.responses(form) | others


class BatchConfig(Section):
    """How much a step samples, and in how many updates it learns from that."""

    prompts_per_step: PositiveInt  # prompts that a step samples for
    samples_per_prompt: PositiveInt = 1  # responses to each: the size of a group
    samples_per_minibatch: PositiveInt | None = None  # samples an update; null: all of the step
    epochs_per_step: PositiveInt = 1  # passes over a step's samples


class PreferenceBatchConfig(Section):
    """How much a step learns from; a step is one update, and the batch of every loss."""

    rows_per_step: PositiveInt  # pairs, or responses with a label, of one update


class SFTBatchConfig(Section):
    """How much a step learns from; a step is one update."""

    samples_per_step: PositiveInt  # rows of one update
