"""Builds model inputs and score targets from preference rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.config.schema import RewardModelTrainerConfig, RewardModelTrainingConfig
from mrl.core import Rollout
from mrl.data import PreferenceDataset
from mrl.data.score_inputs import at_every_token, at_last_tokens
from mrl.learner.reward import RewardTargets


@dataclass(frozen=True)
class ScoreBatch:
    """Batch of some rows. texts: as in the data; inputs: as model input; lengths [S]: response tokens of each score;
    sources: data source of each row."""

    texts: Rollout
    inputs: Rollout
    targets: RewardTargets
    lengths: Tensor
    sources: list[str | None]


def score_batch(
    cfg: RewardModelTrainerConfig, data: PreferenceDataset, step: int, numbers: Sequence[int]
) -> ScoreBatch:
    """Builds the batch of these row numbers."""
    own, rows = cfg.reward_model, [data.rows[number] for number in numbers]
    texts, steps = data.batch(step, numbers), None
    sources = [row.source for row in rows]
    if own.form == "steps":
        first = -1 if own.options["train_on_last_step_only"] else 0
        steps = [row.steps[first:] for row in rows]
        targets = torch.tensor([score for row in rows for score in row.scores[first:]])
        lengths = torch.tensor([end for ends in steps for end in ends])
    else:
        targets, lengths = texts.scores if own.form == "scores" else ranks(texts), texts.response_lens
    margin = torch.tensor([row.margin or 0.0 for row in rows], dtype=torch.float64)
    inputs, held = score_inputs_and_targets(own, texts, targets, margin, steps)
    return ScoreBatch(texts, inputs, held, lengths.double(), sources)


def ranks(texts: Rollout) -> Tensor:
    """Returns ranks [B] by score: 1 for the best text of a row, which comes first, plus each text's distance to its
    score."""
    first = (texts.group.diff(prepend=texts.group.new_tensor([-1])) > 0).nonzero()[:, 0]
    return 1 + texts.scores[first][texts.group] - texts.scores


def score_inputs_and_targets(
    own: RewardModelTrainingConfig,
    texts: Rollout,
    targets: Tensor,
    margin: Tensor,
    steps: Sequence[Sequence[int]] | None = None,
) -> tuple[Rollout, RewardTargets]:
    """Returns (model input, score targets).

    texts: the texts of a row share one group, and groups count up from 0
    targets [S], margin [rows]: as in RewardTargets
    steps: for each text, the response token counts after which a step ends; None: one score per text
    """
    if steps is None:
        inputs, places, row_of = at_last_tokens(texts), torch.arange(texts.num_samples), texts.group
    else:
        inputs, counts = at_every_token(texts), torch.tensor([len(ends) for ends in steps])
        ends = torch.tensor([end for of_text in steps for end in of_text])
        places = (inputs.response_lens.cumsum(0) - inputs.response_lens).repeat_interleave(counts) + ends
        row_of = texts.group.repeat_interleave(counts)
    together = texts.group.bincount()
    return inputs, RewardTargets(
        own.loss,
        own.options,
        own.form,
        places,
        row_of,
        targets.double(),
        margin,
        outputs=inputs.num_response_tokens,
        together=tuple(together.tolist()) if len(set(together.tolist())) > 1 else int(together[0]),
    )
