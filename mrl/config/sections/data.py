"""Sections `data` and `batch`, and `validation` of the trainers that validate on held-out rows."""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from mrl.options.base import FilePath, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class SourceConfig(Section):
    """A source of rows: FILE.jsonl, FILE.json (a list of objects), FILE.parquet, a directory that the `datasets`
    library has saved (`save_to_disk`) or can load (data files as on the Hugging Face hub), problems of reasoning-gym
    (`reasoning_gym:TASK?size=1000&seed=1`), or the data set of an environment of verifiers
    (`verifiers:NAME?key=value`)."""

    # file, directory, reasoning_gym:TASK with size, seed (0) and settings of the task, or verifiers:NAME with arguments
    # of its load_environment
    path: FilePath
    split: str | None = None  # split of a directory, required if it has several; of verifiers: train (default) or eval
    name: str | None = None  # value of data_source_key for rows without one
    weight: PositiveFloat | None = None  # relative share of the rows; null for all sources: each row once per epoch


def _listed(value: Any) -> Any:
    """Turns `a.jsonl` and `{path: a.jsonl}` into lists of one source."""
    items = value if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(item, str | dict | SourceConfig) for item in items):
        raise ValueError("must be a path, a section or a list of them")
    return tuple({"path": item} if isinstance(item, str) else item for item in items)


def _short(sources: tuple[SourceConfig, ...]) -> Any:
    """Returns the sources as a person would write them: set keys only, a single path by itself."""
    items = [source.model_dump(exclude_none=True) for source in sources]
    texts = [item["path"] if item.keys() == {"path"} else item for item in items]
    return texts[0] if len(texts) == 1 else texts


Form = Literal["pairs", "labels", "lists", "scores", "steps"]  # what each row of preference data contains

Sources = Annotated[
    tuple[SourceConfig, ...],
    Field(description="path | section | [path or section, ...]"),
    BeforeValidator(_listed),
    PlainSerializer(_short, when_used="json"),
]


class DataConfig(Section):
    """Sources of prompts: a path, a section with a path, or a list of either.

    `prompt_key` names text, or with `chat_template` also a list of chat messages (text is then one user message). A
    dotted key that a row lacks reaches into nested objects: `reward_model.ground_truth`.

    With `chat_template` a row may also have a system message, tools and further variables of the template; all trainers
    read these columns alike. Without `chat_template` they have no effect, which a note at the start reports.

    With `chat_template`, names of control tokens in a row ("<|im_start|>") are tokenized as text. Without it, a row is
    the whole prompt, and such names become the control tokens.
    """

    train: Sources  # training rows
    validation: Sources | None = None  # held-out rows; null: no validation
    prompt_key: str = "prompt"  # column of the prompt
    answer_key: str = "answer"  # column of the answer, for the reward or for sft
    system_key: str | None = "system"  # column of the system message; null: none
    tools_key: str | None = "tools"  # column of the tools for the chat template; null: none
    # column of further variables of the chat template, such as enable_thinking; null: none
    chat_template_kwargs_key: str | None = "chat_template_kwargs"
    # column of the data source, by which reward.functions and reward.recipe choose
    data_source_key: str = "data_source"
    chat_template: bool = False  # apply the tokenizer's chat template to prompts
    # maximum tokens of a prompt, including the chat template. Where max_tokens is set to 1024 or less, the default is
    # half of it
    max_prompt_tokens: PositiveInt = 1024
    # if a prompt is too long: leave the row out (drop), truncate the prompt on the left, on the right or in the middle,
    # or end the run (error)
    truncation: Literal["drop", "left", "right", "middle", "error"] = "drop"
    shuffle: bool = True  # shuffle every epoch differently, by run.seed
    # column of the images, for vision models: a path below the data's folder, bytes, a data: URL, or a list of these;
    # the prompt has <image> where each one belongs
    images_key: str = "images"
    max_images: PositiveInt = 8  # maximum images of a row; a row with more is refused
    max_image_tokens: PositiveInt = 1280  # maximum tokens of an image; a larger one is downscaled


def halve_prompts(data: DataConfig, max_tokens: int) -> None:
    """Sets the default of max_prompt_tokens to half of `max_tokens`, if it would leave no room for a response."""
    if "max_prompt_tokens" not in data.model_fields_set and 2 <= max_tokens <= data.max_prompt_tokens:
        data.__dict__["max_prompt_tokens"] = max_tokens // 2  # the frozen model is still under construction


class PreferenceDataConfig(DataConfig):
    """Sources of preferences: pairs, ranked lists, or labeled responses.

    A pair has `chosen_key` and `rejected_key`, a ranked list has `completions_key`. Without `prompt_key`, these are
    whole texts or conversations, and their common beginning is the prompt. A labeled response has `prompt_key`,
    `completion_key` and `label_key`. If the loss needs labels and the data has pairs, chosen responses are good and
    rejected ones bad. Text gets one EOS at its end; a conversation ends as the chat template ends its last turn.
    """

    chosen_key: str = "chosen"  # column of the better response: text, or with chat_template also messages
    rejected_key: str = "rejected"  # column of the worse response
    completions_key: str = "completions"  # column of a ranked list: [{rank: 1, completion: ...}, ...]; lower is better
    # pairs of a ranked list: best and worst (extremes), or any two of different ranks (all)
    ranked_pairs: Literal["extremes", "all"] = "extremes"
    completion_key: str = "completion"  # column of a labeled or scored response
    label_key: str = "label"  # column of the response's label: true (good) or false
    margin_key: str = "margin"  # column of the required margin of the chosen response, a number
    max_tokens: PositiveInt = 2048  # maximum tokens of prompt and response; longer responses are truncated at the end

    @model_validator(mode="after")
    def _prompts_leave_room(self) -> Self:
        halve_prompts(self, self.max_tokens)
        return self

    def needed(self, form: Form, columns: Container[str], margins: bool) -> dict[str, str]:
        """Returns setting -> column name for the columns that a row with `columns` must have."""

        def has(key: str) -> bool:
            return key in columns or ("." in key and key.split(".")[0] in columns)

        found = {"chosen_key": self.chosen_key, "rejected_key": self.rejected_key}
        if form != "labels" and has(self.completions_key):
            found = {"completions_key": self.completions_key}
        elif form == "labels" and not (has(self.chosen_key) and has(self.rejected_key)):
            found = {"completion_key": self.completion_key, "prompt_key": self.prompt_key, "label_key": self.label_key}
        return found | ({"margin_key": self.margin_key} if margins else {})


class RewardDataConfig(PreferenceDataConfig):
    """Sources of pairs or ranked lists, as for `trainer: dpo`, or of scored responses, or of solutions in steps.

    A scored text must be complete: rows whose response exceeds `max_tokens` are left out. A conversation ends with the
    EOS of its last turn, as generated responses do. A solution is text, tokenized step by step.
    """

    score_key: str = "score"  # column of a response's score, a number
    labels_key: str = "labels"  # column of a solution's labels: true or false for each step in `completions_key`
    step_separator: str = "\n"  # text after each step, and part of it

    def needed(self, form: Form, columns: Container[str], margins: bool) -> dict[str, str]:
        """Returns setting -> column name for the columns that a row with `columns` must have."""
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
    """Sources of rows for supervised fine-tuning: prompts with answers, conversations, or texts.

    An answer is text, which gets one EOS at its end, or with `chat_template` a list of messages that follow those of
    the prompt. The chat template formats a conversation as a whole, and the assistant's turns are trained, each up to
    its end token; a message may have a `weight` (0: not trained). A text gets one EOS at its end.
    """

    form: Literal["answers", "messages", "text"] = "answers"  # kind of rows: prompt and answer, conversation, text
    messages_key: str = "messages"  # column of the conversation
    text_key: str = "text"  # column of the text
    weight_key: str | None = None  # column of the loss weight of a row's tokens; null: equal weights
    # train only on the answer, or on the assistant's turns; false: train on all tokens but the first
    completion_only: bool = True
    train_on: Literal["all", "last"] = "all"  # which turns of the assistant to train on
    # maximum tokens of a row; longer rows are truncated at the end; null: no limit
    max_tokens: PositiveInt | None = None

    @model_validator(mode="after")
    def _prompts_leave_room(self) -> Self:
        if self.form == "answers" and self.max_tokens is not None:
            halve_prompts(self, self.max_tokens)
        return self

    def needed_keys(self) -> dict[str, str]:
        """Returns setting -> column name for the columns that every row must have."""
        by_form = {
            "answers": {"prompt_key": self.prompt_key, "answer_key": self.answer_key},
            "messages": {"messages_key": self.messages_key},
            "text": {"text_key": self.text_key},
        }
        return by_form[self.form]


class BatchConfig(Section):
    """Batch sizes: samples per step, and the updates made from them."""

    prompts_per_step: PositiveInt  # prompts per step
    samples_per_prompt: PositiveInt = 1  # responses per prompt: the group size
    samples_per_minibatch: PositiveInt | None = None  # samples per update; null: all samples of the step
    epochs_per_step: PositiveInt = 1  # passes over the samples of a step
    # shuffle the mini-batches of each pass, by run.seed, step and pass; false: the order of the prompts in each pass,
    # which keeps the samples of a prompt together
    shuffle_minibatches: bool = False


class PreferenceBatchConfig(Section):
    """Batch size; a step is one update, and its rows are the batch of every loss."""

    rows_per_step: PositiveInt  # rows per update: pairs, ranked lists or single responses


class SFTBatchConfig(Section):
    """Batch size; a step is one update."""

    samples_per_step: PositiveInt  # rows per update
    epochs: PositiveFloat | None = None  # passes over data.train, instead of run.steps; null: run.steps decides


class HeldOutConfig(Section):
    """Validation on the held-out rows of data.validation."""

    every_steps: PositiveInt = 100  # steps between validations; the last step has one too
    rows: PositiveInt | None = None  # use the first N rows of data.validation; null: all
    at_start: bool = True  # also validate before the first step
    metric: str = "loss"  # metric that decides which validation is better
    min_delta: NonNegativeFloat = 0.0  # minimum change of the metric that counts as an improvement
    patience: PositiveInt | None = None  # end the run after this many validations without improvement; null: never
    # keep the checkpoint of the best validation as checkpoints/best; export_hf then also writes RUN_DIR/hf_best
    keep_best: bool = False


class LikelihoodConfig(HeldOutConfig):
    """Validation on the held-out rows of data.validation: mean negative log-likelihood per token and perplexity, also
    by source, and the share of tokens that the model ranks first."""

    metric: Literal["loss", "token_accuracy"] = "loss"  # metric that decides which validation is better


class ComparisonConfig(HeldOutConfig):
    """Validation on the held-out rows of data.validation as one batch: the loss, and all other metrics of a step."""

    metric: Literal["loss", "rewards/accuracies", "rewards/margins"] = "loss"  # decides which validation is better
