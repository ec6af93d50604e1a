"""A reward model that Megatron runs on every rank, for rank 0 to ask in the midst of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mrl.config.schema import RewardModelConfig
from mrl.core import Ids, Rollout
from mrl.data.scored import at_last_tokens
from mrl.learner import Learner


@dataclass(frozen=True)
class ToScore:
    """What rank 0 summons the others for: prompt + response of each sample."""

    sequences: tuple[np.ndarray, ...]


def score(model: Learner, cfg: RewardModelConfig, sequences: Sequence[Ids]) -> list[float]:
    """The score of each sequence, at its last token. Collective."""
    texts = Rollout.of(0, sequences, [sequence[:0] for sequence in sequences], rows=torch.arange(len(sequences)))
    return of_heads(model.scores(at_last_tokens(texts)), cfg).tolist()


def of_heads(scores: Tensor, cfg: RewardModelConfig) -> Tensor:
    """[n] of [heads, n]."""
    if cfg.heads == "min":
        return scores.amin(0)
    return scores.mean(0) - cfg.std_coef * scores.std(0, correction=0)
