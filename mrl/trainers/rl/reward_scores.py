"""A reward model that Megatron runs on every rank, for rank 0 to ask in the midst of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.config.schema import RewardModelConfig
from mrl.core import Rollout, Sample
from mrl.data.score_inputs import at_last_tokens
from mrl.learner import Learner


@dataclass(frozen=True)
class ToScore:
    """Rank 0's request to all ranks to score samples. texts: prompt and response of each sample, with references to the
    pictures"""

    texts: Rollout


def to_score(samples: Sequence[Sample], sees: bool) -> ToScore:
    """sees: whether the model sees pictures; one of text alone is told an image token for each. Where the policy sees
    none, an image token is no picture's, wherever it stands."""
    prompts = [sample.request.prompt for sample in samples]
    if not sees or any(prompt.images is None for prompt in prompts):
        ids = [(prompt.text_token_ids, sample.response_ids) for prompt, sample in zip(prompts, samples, strict=True)]
        wholes = [[*asked, *said.tolist()] for asked, said in ids]
        return ToScore(Rollout.of(0, [whole[:1] for whole in wholes], [whole[1:] for whole in wholes]))
    shapes = [shape for prompt in prompts for shape in prompt.images or ()]
    rows = [prompt.index if prompt.picture_row is None else prompt.picture_row for prompt in prompts]
    texts = Rollout.of(
        0,
        [prompt.token_ids for prompt in prompts],
        [sample.response_ids for sample in samples],
        rows=torch.tensor(rows),
        image_counts=torch.tensor([len(prompt.images or ()) for prompt in prompts]),
        images=torch.tensor(shapes, dtype=torch.int64).reshape(-1, 3),
    )
    return ToScore(texts)


def score(model: Learner, cfg: RewardModelConfig, texts: Rollout) -> list[float]:
    """The score of each, at its last token. Collective."""
    return of_heads(model.scores(at_last_tokens(texts)), cfg).tolist()


def of_heads(scores: Tensor, cfg: RewardModelConfig) -> Tensor:
    """[n] of [heads, n]."""
    if cfg.heads == "min":
        return scores.amin(0)
    return scores.mean(0) - cfg.std_coef * scores.std(0, correction=0)
