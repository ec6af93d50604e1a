"""What corrects a step's losses for the engine being another policy than the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mrl.algo import rollout_correction
from mrl.config.schema import RolloutCorrectionConfig
from mrl.core import Rollout


@dataclass(frozen=True)
class Correction:
    """weights [R] float32: factors of the policy loss, None: all 1; keep [R] bool: False for rejected tokens, which no
    loss of the actor counts; metrics: how much was cut.

    Advantages are made from all samples, and the critic learns from all (in verl, rejected tokens are out of gae's
    whitening and of the value loss too)."""

    weights: Tensor | None
    keep: Tensor
    metrics: dict[str, float]

    @classmethod
    def make(cls, cfg: RolloutCorrectionConfig, rollout: Rollout, trainer_log_probs: Tensor) -> Correction:
        """trainer_log_probs [R]: of the policy at the start of the step."""
        mask, weights = rollout.response_mask, None
        log_ratio = rollout.dense(trainer_log_probs - rollout.rollout_log_probs)
        criteria = [rollout_correction.Criterion(*criterion) for criterion in cfg.criteria()]
        keep, metrics = rollout_correction.reject(log_ratio, mask, criteria) if criteria else (mask, {})
        if cfg.rollout_is is not None:
            lower, upper = cfg.importance_bounds()
            weights, cut = rollout_correction.importance_weights(
                log_ratio,
                mask,
                level=cfg.rollout_is,
                lower=lower,
                upper=upper,
                batch_normalize=cfg.rollout_is_batch_normalize,
            )
            metrics |= cut
        return cls(
            None if weights is None else rollout.flat(weights),
            rollout.flat(keep),
            {f"rollout_corr/{name}": value for name, value in metrics.items()},
        )
