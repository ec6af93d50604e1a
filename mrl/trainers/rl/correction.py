"""Corrections of a step's losses for the difference between the engine's policy and the trainer's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mrl.algo.rollout_correction import Criterion, correct
from mrl.config.schema import RolloutCorrectionConfig
from mrl.core import Rollout
from mrl.units import PerResponseToken


@dataclass(frozen=True)
class FlatCorrection:
    """`mrl.algo.rollout_correction.Correction` of a rollout's response tokens: weights [R] float32, keep [R] bool."""

    weights: PerResponseToken | None
    keep: PerResponseToken
    metrics: dict[str, float]


def correction_of(cfg: RolloutCorrectionConfig, rollout: Rollout, trainer_log_probs: Tensor) -> FlatCorrection:
    """Returns the correction of a step's tokens. trainer_log_probs [R]: of the policy at the start of the step.

    Advantages are made from all samples, and the critic learns from all (in verl, rejected tokens are out of gae's
    whitening and of the value loss too).
    """
    lower, upper = cfg.importance_bounds()
    made = correct(
        rollout.dense(trainer_log_probs),
        rollout.dense(rollout.rollout_log_probs),
        rollout.response_mask,
        level=cfg.rollout_is,
        lower=lower,
        upper=upper,
        batch_normalize=cfg.rollout_is_batch_normalize,
        criteria=[Criterion(*criterion) for criterion in cfg.criteria()],
    )
    return FlatCorrection(
        None if made.weights is None else rollout.flat(made.weights),
        rollout.flat(made.keep),
        {f"rollout_corr/{name}": value for name, value in made.metrics.items()},
    )
