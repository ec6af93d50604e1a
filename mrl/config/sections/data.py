"""Data and batches."""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from mrl.config.sections.base import FilePath, PositiveFloat, PositiveInt, Section


class SourceConfig(Section):
    """Rows in one place: FILE.jsonl, FILE.json (a list of objects), FILE.parquet, or a directory that the `datasets`
    library has saved (`save_to_disk`) or would load (data files as on the Hugging Face hub)."""

    path: FilePath  # file or directory
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


Form = Literal["pairs", "labels", "lists", "scores", "steps"]  # of preferences: what a batch of them has of every row

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

    With `chat_template` a row may also have a system message, tools and further variables of the template: every
    trainer reads them alike. Without, such columns are left alone, and named at the start.

    With `chat_template` the names of control tokens in a row ("<|im_start|>") are text to the model; without, a row is
    the whole prompt, and they are the tokens.
    """

    train: Sources  # what is learnt from
    validation: Sources | None = None  # held-out rows; null: no validation
    prompt_key: str = "prompt"  # where a row has its prompt
    answer_key: str = "answer"  # where a row has what the reward, or sft, takes as the answer
    system_key: str | None = "system"  # where a row has the system's message of its conversation; null: nowhere
    tools_key: str | None = "tools"  # where a row has the tools that the chat template is told of; null: nowhere
    # where a row has further variables of the chat template, such as enable_thinking; null: nowhere
    chat_template_kwargs_key: str | None = "chat_template_kwargs"
    # where a row says its kind, by which reward.functions and reward.recipe choose
    data_source_key: str = "data_source"
    chat_template: bool = False  # put prompts into the tokenizer's chat template
    # tokens of a prompt, chat template included; half of data.max_tokens where that is 1024 or less
    max_prompt_tokens: PositiveInt = 1024
    # longer prompts: left out, cut there, or the run ends
    truncation: Literal["drop", "left", "right", "middle", "error"] = "drop"
    shuffle: bool = True  # every epoch in an order of its own, by run.seed
    # where a row has its pictures, for a model that sees them: a path below the folder of the data, bytes, a data: text
    # or a list of these; the prompt says <image> where each one is
    images_key: str = "images"
    max_images: PositiveInt = 8  # pictures of a row; one with more is refused
    max_image_tokens: PositiveInt = 1280  # of a picture; a larger one is made smaller


def halve_prompts(data: DataConfig, max_tokens: int) -> None:
    """Sets the default of max_prompt_tokens, which a row of few tokens has no room for, to half of the row."""
    if "max_prompt_tokens" not in data.model_fields_set and 2 <= max_tokens <= data.max_prompt_tokens:
        data.__dict__["max_prompt_tokens"] = max_tokens // 2  # of a frozen model, while it is made


class PreferenceDataConfig(DataConfig):
    """Where preferences come from: pairs, ranked lists, or responses with a label.

    A pair has `chosen_key` and `rejected_key`, a ranked list `completions_key`; without `prompt_key` these are whole
    texts or conversations, whose common beginning is the prompt. A response with a label has `prompt_key`,
    `completion_key` and `label_key`; where labels are asked for and there are pairs, their halves are good and bad
    ones. Text gets one EOS at its end, a conversation what the chat template ends its last turn with.
    """

    chosen_key: str = "chosen"  # the better response: text, or with chat_template messages too
    rejected_key: str = "rejected"  # the worse response
    completions_key: str = "completions"  # a ranked list: [{rank: 1, completion: ...}, ...]; the lower, the better
    # the pairs of a ranked list: its best and its worst, or any two of different ranks
    ranked_pairs: Literal["extremes", "all"] = "extremes"
    completion_key: str = "completion"  # the only response
    label_key: str = "label"  # whether that is a good one: true or false
    margin_key: str = "margin"  # a number: by how much the chosen response is to lead
    max_tokens: PositiveInt = 2048  # tokens of prompt and response; longer responses are cut at their end

    @model_validator(mode="after")
    def _prompts_leave_room(self) -> Self:
        halve_prompts(self, self.max_tokens)
        return self

    def needed(self, form: Form, columns: Container[str], margins: bool) -> dict[str, str]:
        """The settings that name what a row must have that has these columns -> the names."""

        def has(key: str) -> bool:
            return key in columns or ("." in key and key.split(".")[0] in columns)

        found = {"chosen_key": self.chosen_key, "rejected_key": self.rejected_key}
        if form != "labels" and has(self.completions_key):
            found = {"completions_key": self.completions_key}
        elif form == "labels" and not (has(self.chosen_key) and has(self.rejected_key)):
            found = {"completion_key": self.completion_key, "prompt_key": self.prompt_key, "label_key": self.label_key}
        return found | ({"margin_key": self.margin_key} if margins else {})


class RewardDataConfig(PreferenceDataConfig):
    """Where pairs or ranked lists come from, as for `trainer: dpo`, or responses with a score, or solutions in steps.

    What is scored has its end: rows with a response that `max_tokens` would cut are left out, and a conversation ends
    with the EOS of its last turn, as sampled answers do. A solution is text, tokenised step by step.
    """

    score_key: str = "score"  # of a response: a number
    labels_key: str = "labels"  # of a solution, whose steps are the list under `completions_key`: true or false of each
    step_separator: str = "\n"  # what follows each step, and belongs to it

    def needed(self, form: Form, columns: Container[str], margins: bool) -> dict[str, str]:
        """The settings that name what a row must have that has these columns -> the names."""
        if form == "scores":
            return {"completion_key": self.completion_key, "prompt_key": self.prompt_key, "score_key": self.score_key}
        if form == "steps":
            return {
                "completions_key": self.completions_key,
                "prompt_key": self.prompt_key,
                "labels_key": self.labels_key,
            }
        return super().needed(form, columns, margins)


class SFTDataConfig(DataConfig):
    """Where rows to imitate come from. Each is a prompt with its answer, a conversation, or a text.

    An answer is text, which gets one EOS at its end, or with `chat_template` a list of messages that follow the
    prompt's. A conversation goes through the chat template as a whole, and the assistant's turns are learnt, each up to
    the token that ends it; a message may have a `weight` (0: not learnt). A text gets one EOS at its end.
    """

    form: Literal["answers", "messages", "text"] = "answers"  # what a row is: prompt and answer, a conversation, a text
    messages_key: str = "messages"  # where a row has its conversation
    text_key: str = "text"  # where a row has its text
    weight_key: str | None = None  # where a row says how much each of its tokens counts; null: all rows count alike
    # what is learnt besides the answer, or the assistant's turns: nothing, or (false) everything but the first token
    completion_only: bool = True
    train_on: Literal["all", "last"] = "all"  # which of the assistant's turns
    max_tokens: PositiveInt | None = None  # tokens of a whole row; longer ones are cut at their end; null: none are

    @model_validator(mode="after")
    def _prompts_leave_room(self) -> Self:
        if self.form == "answers" and self.max_tokens is not None:
            halve_prompts(self, self.max_tokens)
        return self

    def needed_keys(self) -> dict[str, str]:
        """The settings that name what every row has -> the names."""
        by_form = {
            "answers": {"prompt_key": self.prompt_key, "answer_key": self.answer_key},
            "messages": {"messages_key": self.messages_key},
            "text": {"text_key": self.text_key},
        }
        return by_form[self.form]


class BatchConfig(Section):
    """How much a step samples, and in how many updates it learns from that."""

    prompts_per_step: PositiveInt  # prompts that a step samples for
    samples_per_prompt: PositiveInt = 1  # responses to each: the size of a group
    samples_per_minibatch: PositiveInt | None = None  # samples an update; null: all of the step
    epochs_per_step: PositiveInt = 1  # passes over a step's samples
    # each pass has other mini-batches, drawn by run.seed, step and pass alone; false: in the order of the prompts, the
    # same in each pass, which keeps the samples of a prompt together
    shuffle_minibatches: bool = False


class PreferenceBatchConfig(Section):
    """How much a step learns from; a step is one update, and the batch of every loss."""

    rows_per_step: PositiveInt  # pairs, or responses with a label, of one update


class SFTBatchConfig(Section):
    """How much a step learns from; a step is one update."""

    samples_per_step: PositiveInt  # rows of one update
    epochs: PositiveFloat | None = None  # passes over data.train, in place of run.steps; null: as many as run.steps are
