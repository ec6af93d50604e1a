"""Configuration and checks of `trainer: reward_model`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from mrl.config.checks.base import Archs, without_effect
from mrl.config.derived import Machine
from mrl.config.problems import Problem
from mrl.config.sections.data import RewardDataConfig
from mrl.config.sections.reward_model import RewardModelTraining, reward_model_training
from mrl.config.trainers.base import DataUse, ModelSpec, ModelUse
from mrl.config.trainers.preferences import PreferencesConfig, check_common
from mrl.families import ModelArch, UnsupportedModel, is_reward_model, load_arch

LOSS, HEADS, START = "reward_model.loss", "reward_model.heads", "reward_model.head_start"


class RewardModelTrainerConfig(PreferencesConfig):
    """`trainer: reward_model`: a model that scores texts, trained on pairs, ranked lists, scores or labeled steps."""

    trainer: Literal["reward_model"]  # a model that scores texts, for reward.model
    data: RewardDataConfig
    reward_model: RewardModelTraining = reward_model_training()

    def models(self) -> dict[str, ModelUse]:
        return {"actor": replace(super().models()["actor"], has_head=True)}

    def built(self) -> dict[str, ModelSpec]:
        return {"actor": ModelSpec(None, self.actor, scores=True, is_trained=True)}

    @property
    def responses_per_row(self) -> int:
        return 2 if self.reward_model.form == "pairs" else 1

    def validated_metrics(self) -> tuple[str, ...]:
        all_metrics = ("loss", "rewards/accuracies", "rewards/margins")
        return all_metrics[: {"scores": 1, "steps": 2}.get(self.reward_model.form, 3)]

    def data_uses(self) -> dict[str, DataUse]:
        own = self.reward_model
        rows = self.batch.rows_per_step
        return {"data": DataUse(self.data, rows, False, own.form, own.uses_margin, cuts=False, is_evaluated=True)}

    def summary(self) -> list[tuple[str, str]]:
        what = {"pairs": "pairs", "lists": "ranked lists", "scores": "responses", "steps": "solutions"}
        rows = [("step", f"{self.batch.rows_per_step} {what[self.reward_model.form]}, 1 update")]
        return [*rows, ("loss", self.reward_model.loss)]

    def starts_from_head(self) -> bool:
        """True if training starts from the score head of model.path."""
        start = self.reward_model.head_start
        has_one = not self.model.from_scratch and is_reward_model(self.model.path)
        return start == "checkpoint" or (start is None and has_one)

    def trained_arch(self) -> ModelArch:
        """Returns the shape of model.path with the score head to train."""
        arch, own = load_arch(self.model.path), self.reward_model
        heads = own.heads or (arch.score_heads if self.starts_from_head() else 1)
        return replace(arch, score_heads=heads, scores_steps=own.form == "steps")


def check(cfg: RewardModelTrainerConfig, archs: Archs, machine: Machine) -> Iterator[Problem]:
    yield from check_common(cfg, archs, machine)
    yield from without_effect(cfg.data, "data", ["answer_key"], "a reward model trains on whole responses", "trainer")
    yield from _data_keys(cfg)
    own = cfg.reward_model
    if own.heads is not None and own.heads > 1:
        if own.form == "steps":
            yield Problem((HEADS, "reward_model.loss"), "process uses one head: set 1")
        if own.head_start == "zero":
            yield Problem((HEADS, START), "heads that all start at zero stay equal: set head_start: normal")
    if own.head_start == "checkpoint" and cfg.model.from_scratch:
        yield Problem((START, "model.from_scratch"), "from_scratch reads no checkpoint: use zero or normal")


def _data_keys(cfg: RewardModelTrainerConfig) -> Iterator[Problem]:
    form, because = cfg.reward_model.form, f"the loss is {cfg.reward_model.loss}"
    read = {
        "pairs": {"chosen_key", "rejected_key", "completions_key", "ranked_pairs"},
        "lists": {"chosen_key", "rejected_key", "completions_key"},
        "scores": {"completion_key", "score_key"},
        "steps": {"completions_key", "labels_key", "step_separator"},
    }
    others = sorted({"label_key"}.union(*read.values()) - read[form])
    yield from without_effect(cfg.data, "data", others, because, LOSS)
    if not cfg.reward_model.uses_margin:
        yield from without_effect(cfg.data, "data", ["margin_key"], "no margin is used", "reward_model.use_margin")


def check_files(cfg: RewardModelTrainerConfig) -> Iterator[Problem]:
    """Checks that model.path has the score head that the settings need."""
    own, path = cfg.reward_model, cfg.model.path
    try:
        found = load_arch(path).score_heads if is_reward_model(path) and not cfg.model.from_scratch else None
    except (UnsupportedModel, OSError, ValueError, KeyError):
        return  # `checks.models` reports these errors
    if found is None and own.head_start == "checkpoint":
        yield Problem((START, "model.path"), f"{path} has no score head: use zero or normal")
    if found is None and own.heads is not None and own.heads > 1 and own.head_start is None:
        yield Problem((HEADS, START), "heads that all start at zero stay equal: set head_start: normal")
    if found is not None and own.heads is not None and own.heads != found:
        yield Problem((HEADS, "model.path"), f"{own.heads} heads, but the head of {path} has {found}")
