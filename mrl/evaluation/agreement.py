"""Agreement of a reward model with human preferences on its run's data.validation, in one process."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from mrl.config.schema import RewardModelTrainerConfig
from mrl.data import PreferenceDataset, load_image_processor, load_tokenizer
from mrl.evaluation.estimates import Estimate
from mrl.scoring.measure import score_rows


def reward_model_agreement(cfg: RewardModelTrainerConfig, weights: str, rows: int | None) -> dict[str, Any]:
    """Returns `agreement` (share of rows whose best response has the strictly highest score), also by source, and
    `margin`.

    `margin` is the lead over the best other response. All have intervals and are over the first `rows` rows.

    weights: a ...ForSequenceClassification directory, or a converted one
    Raises DataError, TokenizerError or WeightError; ValueError for rows with scores or steps, which have no preference.
    """
    own, held = cfg.reward_model, cfg.data.validation
    assert held is not None
    if own.form not in ("pairs", "lists"):
        raise ValueError(f"rows of the form {own.form} say not which of several responses is better")
    tokenizer = load_tokenizer(weights, cfg.model.eos_token, cfg.model.chat_template)
    image_processor = load_image_processor(weights, cfg.data)
    data = PreferenceDataset(
        held, cfg.data, tokenizer, own.form, own.uses_margin, cuts=False, image_processor=image_processor
    )
    judged = score_rows(weights, data, cfg.actor.max_tokens_per_microbatch, lambda done, all_of_them: None)
    judged = judged[: rows or sys.maxsize]
    kinds = sorted({one.subset for one in judged if one.subset is not None})
    estimates = {
        "agreement": Estimate.of([float(one.is_right) for one in judged]),
        "margin": Estimate.of([one.margin for one in judged]),
    }
    for kind in kinds:
        estimates[f"agreement/{kind}"] = Estimate.of([float(one.is_right) for one in judged if one.subset == kind])
    return {"estimates": {name: asdict(each) for name, each in estimates.items()}}
