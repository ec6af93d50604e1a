"""Base class and checks of the trainers that learn from preferences."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from mrl.config.checks.base import Archs
from mrl.config.checks.data import check_held_out, check_preferences
from mrl.config.checks.layout import check_shares
from mrl.config.derived import Machine
from mrl.config.problems import Problem
from mrl.config.sections.data import ComparisonConfig, PreferenceBatchConfig, PreferenceDataConfig
from mrl.config.trainers.base import Config, StepSize


class PreferencesConfig(Config):
    """Base of trainers whose rows compare or rate responses."""

    data: PreferenceDataConfig
    batch: PreferenceBatchConfig
    validation: ComparisonConfig = ComparisonConfig()

    @property
    def sees_pictures(self) -> bool:
        return True

    @property
    @abstractmethod
    def responses_per_row(self) -> int:
        """Responses that count for a row: 2 of a pair, else 1 (a ranked list has any number)."""

    @abstractmethod
    def validated_metrics(self) -> tuple[str, ...]:
        """Returns the values that validation.metric may have."""

    def held_out(self) -> ComparisonConfig:
        return self.validation

    def passes(self) -> tuple[str, ...]:
        """Returns the models that compute a step's samples before its update."""
        return ()

    def step_size(self) -> StepSize:
        samples, longest = self.batch.rows_per_step * self.responses_per_row, self.data.max_prompt_tokens
        return StepSize(
            learnt=samples,
            minibatch=samples,
            prompt_tokens=longest,
            response_tokens=self.data.max_tokens - longest,
            passes=self.passes(),
            image_tokens=min(longest, self.data.max_images * self.data.max_image_tokens),
        )


def check_common(cfg: PreferencesConfig, archs: Archs, machine: Machine) -> Iterator[Problem]:
    """Runs the checks that `dpo` and `reward_model` share."""
    yield from check_shares(cfg, machine, "batch.rows_per_step", cfg.batch.rows_per_step, "rows")
    yield from check_preferences(cfg.data, archs["actor"])
    yield from check_held_out(cfg)
    known, metric = cfg.validated_metrics(), cfg.validation.metric
    if metric not in known:
        yield Problem(("validation.metric",), f"{metric} is not a metric of these losses: use {' or '.join(known)}")
