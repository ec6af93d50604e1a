"""Checks of section `validation` against the rest of the configuration."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.checks.base import without_effect
from mrl.config.problems import Problem
from mrl.config.trainers.base import Config


def check_held_out(cfg: Config) -> Iterator[Problem]:
    """Checks a trainer that validates on held-out rows."""
    validation = cfg.held_out()
    assert validation is not None
    if cfg.data.validation is None:
        names = list(type(validation).model_fields)
        yield from without_effect(validation, "validation", names, "there are no held-out rows", "data.validation")
        return
    if validation.keep_best and cfg.checkpoint.every_steps is None:
        message = "no checkpoints are written: set checkpoint.every_steps to keep the best one"
        yield Problem(("validation.keep_best", "checkpoint.every_steps"), message)
    if not validation.keep_best and validation.patience is None:
        because = "neither keep_best nor patience uses it"
        yield from without_effect(validation, "validation", ["metric", "min_delta"], because, "validation.patience")
