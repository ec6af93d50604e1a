"""Configuration and checks of `trainer: sft`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mrl.config.checks.base import Archs, check_positions, without_effect
from mrl.config.checks.data import check_held_out
from mrl.config.checks.layout import check_shares
from mrl.config.derived import Machine
from mrl.config.problems import Problem
from mrl.config.sections.data import LikelihoodConfig, SFTBatchConfig, SFTDataConfig
from mrl.config.sections.sft import ImitationConfig, PackingConfig
from mrl.config.trainers.base import Config, DataUse, StepSize


class SFTConfig(Config):
    """`trainer: sft`: supervised fine-tuning on answers, conversations or texts; the loss is the mean over the trained
    tokens."""

    trainer: Literal["sft"]  # supervised fine-tuning
    data: SFTDataConfig
    batch: SFTBatchConfig
    packing: PackingConfig = PackingConfig()
    loss: ImitationConfig = ImitationConfig()
    validation: LikelihoodConfig = LikelihoodConfig()

    @property
    def is_wrapped(self) -> bool:
        return self.packing.strategy == "wrapped"

    @property
    def is_packed(self) -> bool:
        """True if a step counts packs or wrapped rows instead of rows of the data."""
        return self.packing.strategy != "planner"

    def imitated(self) -> SFTDataConfig:
        """Returns `data`, with rows limited to the length of a pack if strategy is bfd."""
        if self.packing.strategy != "bfd":
            return self.data
        most = min(self.data.max_tokens or self.packing.seq_length, self.packing.seq_length)
        return self.data.model_copy(update={"max_tokens": most})

    def step_size(self) -> StepSize:
        rows, length = self.batch.samples_per_step, self.packing.seq_length
        if not self.is_packed:
            return super().step_size()
        return StepSize(learnt=rows, minibatch=rows, prompt_tokens=1, response_tokens=length - 1)

    def data_uses(self) -> dict[str, DataUse]:
        return {"data": DataUse(self.imitated(), self.batch.samples_per_step, is_evaluated=True)}

    def steps_follow_data(self) -> bool:
        return self.batch.epochs is not None

    def held_out(self) -> LikelihoodConfig:
        return self.validation

    def summary(self) -> list[tuple[str, str]]:
        rows = [("step", f"{self.batch.samples_per_step} samples, 1 update")]
        return rows + ([("epochs", f"{self.batch.epochs:g}")] if self.batch.epochs is not None else [])


def check(cfg: SFTConfig, archs: Archs, machine: Machine) -> Iterator[Problem]:
    yield from check_shares(cfg, machine, "batch.samples_per_step", cfg.batch.samples_per_step)
    if cfg.batch.epochs is not None:
        because = "batch.epochs sets the length of the run"
        yield from without_effect(cfg.run, "run", ["steps"], because, "batch.epochs")
    yield from check_held_out(cfg)
    yield from _rows(cfg)
    yield from _packing(cfg, archs)
    if cfg.loss.type == "dft" and cfg.loss.label_smoothing:
        yield Problem(("loss.label_smoothing", "loss.type"), "dft does not support label smoothing: set 0")
    yield from check_positions("data.max_tokens", cfg.data.max_tokens, archs["actor"])


def _rows(cfg: SFTConfig) -> Iterator[Problem]:
    data, form = cfg.data, "data.form"
    of_form = {"answers": ["prompt_key", "answer_key"], "messages": ["messages_key"], "text": ["text_key"]}
    for other, names in of_form.items():
        if other != data.form:
            yield from without_effect(data, "data", names, f"data.form is {data.form}", form)
    if data.form != "answers":
        because = f"rows of the form {data.form} have no prompt"
        yield from without_effect(data, "data", ["max_prompt_tokens", "truncation"], because, form)
    if data.form == "messages" and not data.chat_template:
        yield Problem(("data.chat_template", form), "conversations need the chat template: set it to true")
    if data.form == "text":
        because = "a text has no turns and is trained on as a whole"
        yield from without_effect(data, "data", ["chat_template", "completion_only"], because, form)
        yield from without_effect(data, "data", ["train_on"], "a text has no turns", form)
    elif not data.completion_only:
        yield from without_effect(data, "data", ["train_on"], "all tokens are trained", "data.completion_only")
    elif data.form == "answers" and not data.chat_template:
        because = "without a chat template an answer is one text"
        yield from without_effect(data, "data", ["train_on"], because, "data.chat_template")
    if data.form == "answers" and data.max_tokens is not None and data.max_prompt_tokens >= data.max_tokens:
        message = f"{data.max_prompt_tokens} prompt tokens leave no room for an answer in {data.max_tokens} tokens"
        yield Problem(("data.max_prompt_tokens", "data.max_tokens"), message)


def _packing(cfg: SFTConfig, archs: Archs) -> Iterator[Problem]:
    packing, strategy = cfg.packing, "packing.strategy"
    if cfg.is_wrapped:
        yield from check_positions("packing.seq_length", packing.seq_length, archs["actor"])
    if cfg.is_packed and packing.seq_length < 2:
        yield Problem(("packing.seq_length",), "must be at least 2: the first token of a row is not trained")
    if not cfg.is_wrapped:
        names = ["num_of_sequences", "infinite"] + ["seq_length"] * (not cfg.is_packed)
        because = "rows are packed" if cfg.is_packed else "rows are not packed"
        yield from without_effect(packing, "packing", names, because, strategy)
        return
    if cfg.data.form != "text":
        yield Problem((strategy, "data.form"), f"wrapped needs form: text, and data.form is {cfg.data.form}")
    yield from without_effect(cfg.data, "data", ["max_tokens"], "texts are wrapped, not truncated", strategy)
    yield from without_effect(cfg.data, "data", ["weight_key"], "wrapped texts have equal weights", strategy)
    if not packing.infinite and (cfg.batch.epochs or 0) > 1:
        message = f"{cfg.batch.epochs:g} epochs need repeated texts: set packing.infinite: true"
        yield Problem(("packing.infinite", "batch.epochs"), message)
