"""A reward model that Megatron runs on every rank, for rank 0 to ask in the midst of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mrl.core import Ids, Rollout
from mrl.learner import Learner


@dataclass(frozen=True)
class ToScore:
    """What rank 0 summons the others for: prompt + response of each sample."""

    sequences: tuple[np.ndarray, ...]


def score(model: Learner, sequences: Sequence[Ids]) -> list[float]:
    """The score of each sequence: the model's value at its last token. Collective."""
    return model.values(_with_one_more(sequences)).tolist()


def _with_one_more(sequences: Sequence[Ids]) -> Rollout:
    """Each sequence as the prompt of one more token, before which the model's value is that of the last one's place.
    Attention is causal: what the token is does not matter."""
    one_more = [sequence[-1:] for sequence in sequences]
    return Rollout.of(0, sequences, one_more, rows=torch.arange(len(sequences)))
