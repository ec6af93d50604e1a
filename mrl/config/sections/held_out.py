"""When held-out rows are looked at, and what follows from what they say."""

from __future__ import annotations

from typing import Literal

from mrl.config.sections.base import NonNegativeFloat, PositiveInt, Section


class HeldOutConfig(Section):
    """What rows that are not learnt say of the model, where data.validation has some."""

    every_steps: PositiveInt = 100  # steps between two of them; the last step has one too
    rows: PositiveInt | None = None  # the first of data.validation; null: all
    at_start: bool = True  # also before the first step
    metric: str = "loss"  # what says which one is better
    min_delta: NonNegativeFloat = 0.0  # a change of the metric up to this much is no progress
    patience: PositiveInt | None = None  # so many in a row without progress end the run; null: none do
    # the best one's checkpoint is written and stays, as checkpoints/best; export_hf then also writes RUN_DIR/hf_best
    keep_best: bool = False


class LikelihoodConfig(HeldOutConfig):
    """The negative log-likelihood of held-out rows, where data.validation has some: the mean over all their tokens, and
    its exponential (perplexity), also by source; the share of tokens that are the likeliest."""

    metric: Literal["loss", "token_accuracy"] = "loss"  # what says which one is better


class ComparisonConfig(HeldOutConfig):
    """What held-out rows say of the model as one batch, where data.validation has some: the loss, and all else that a
    step reports of its rows."""

    metric: Literal["loss", "rewards/accuracies", "rewards/margins"] = "loss"  # what says which one is better
