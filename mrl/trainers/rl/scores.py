"""TRL's controls of the task reward: scaled by running statistics, then clipped. The same on every rank."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mrl.algo.running_moments import RunningMoments
from mrl.config.schema import AlgorithmConfig
from mrl.core import Rollout


class ScoreControl:
    """Score scaling of TRL's classic PPOTrainer: score / (std + eps), with `use_score_norm` (score - mean) / (std +
    eps), then clipped to +- `score_clip`. Mean and std cover all scores of the run so far, including this step; eps is
    float32's."""

    def __init__(self, cfg: AlgorithmConfig) -> None:
        self._scale, self._centre, self._clip = cfg.use_score_scaling, cfg.use_score_norm, cfg.score_clip
        self.moments = RunningMoments()

    def __call__(self, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
        """The rollout with its controlled scores, and metrics; unchanged where nothing is switched on.

        Scores of greedy responses (remax's baseline) become what they would be as scores, and are not counted.
        """
        if not self._scale and self._clip is None:
            return rollout, {}
        if self._scale:
            self.moments.update(rollout.scores)
        greedy = rollout.greedy_scores
        scores = self._control(rollout.scores)
        metrics = {"score/mean": float(scores.mean())}
        if self._scale:
            metrics |= {"score/running_mean": self.moments.mean, "score/running_std": self.moments.std}
        if self._clip is not None:
            metrics["score/clipped"] = float((scores.abs() == self._clip).float().mean())
        return replace(rollout, scores=scores, greedy_scores=None if greedy is None else self._control(greedy)), metrics

    def _control(self, scores: Tensor) -> Tensor:
        if self._scale:
            centred = scores - self.moments.mean if self._centre else scores
            scores = centred / (self.moments.std + torch.finfo(torch.float32).eps)
        return scores if self._clip is None else scores.clamp(-self._clip, self._clip)
