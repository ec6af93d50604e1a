"""Data and batches."""

from __future__ import annotations

from mrl.config.sections.base import PositiveInt, Section


class DataConfig(Section):
    """JSONL rows. `prompt_key` holds text, or a list of chat messages when `chat_template` is true."""

    train: str
    validation: str | None = None
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    chat_template: bool = False
    max_prompt_tokens: PositiveInt = 1024
    shuffle: bool = True


class BatchConfig(Section):
    prompts_per_step: PositiveInt
    samples_per_prompt: PositiveInt = 1
    samples_per_minibatch: PositiveInt | None = None  # all samples of the step when null
    epochs_per_step: PositiveInt = 1


class SFTBatchConfig(Section):
    samples_per_step: PositiveInt
