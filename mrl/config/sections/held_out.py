"""Section `validation` of the trainers that validate on held-out rows."""

from __future__ import annotations

from typing import Literal

from mrl.options.base import NonNegativeFloat, PositiveInt, Section


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
