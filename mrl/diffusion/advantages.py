"""Advantages from the scores of images; equal on every rank, as all scores are."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

EPSILON = {"batch": 1e-8, "prompt": 1e-6, "group": 1e-4}


class PromptStats:
    """The last `buffer_size` scores of each prompt over all ranks; part of the run's state.

    A prompt with fewer than `min_count` scores is normalized by the whole batch (reference of arXiv 2305.13301).
    """

    def __init__(self, buffer_size: int, min_count: int) -> None:
        self._buffer_size, self._min_count = buffer_size, min_count
        self._scores: dict[str, deque[float]] = {}

    def advantages(self, prompts: Sequence[str], scores: np.ndarray) -> np.ndarray:
        """Adds the scores and returns the advantages [B] float64. Standard deviations are of the population."""
        found = np.empty(len(scores))
        for prompt in dict.fromkeys(prompts):
            mine = np.array([other == prompt for other in prompts])
            kept = self._scores.setdefault(prompt, deque(maxlen=self._buffer_size))
            kept.extend(scores[mine].tolist())
            against = scores if len(kept) < self._min_count else np.array(kept)
            found[mine] = (scores[mine] - against.mean()) / (against.std() + EPSILON["prompt"])
        return found

    def state_dict(self) -> dict[str, Any]:
        return {prompt: list(scores) for prompt, scores in self._scores.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scores = {prompt: deque(scores, maxlen=self._buffer_size) for prompt, scores in state.items()}


def of_batch(scores: np.ndarray) -> np.ndarray:
    """Returns advantages [B], normalized over all scores of the step."""
    return (scores - scores.mean()) / (scores.std() + EPSILON["batch"])


def of_groups(scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns advantages [B], normalized over the images of the same prompt (GRPO, arXiv 2402.03300).

    The standard deviation is of the population. A group of one, or of equal scores, has advantage 0.
    """
    found = np.zeros(len(scores))
    for group in np.unique(groups):
        mine = groups == group
        found[mine] = (scores[mine] - scores[mine].mean()) / (scores[mine].std() + EPSILON["group"])
    return found
