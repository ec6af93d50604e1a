"""Evaluation of a model: likelihood of held-out rows, correct answers, agreement with human preferences, benchmarks."""

from mrl.evaluation.agreement import reward_model_agreement
from mrl.evaluation.answers import evaluate_answers, why_unanswerable
from mrl.evaluation.estimates import Estimate, majority_at, pass_at
from mrl.evaluation.held_out import held_out
from mrl.evaluation.lm_harness import lm_eval_scores
from mrl.evaluation.show import lines, page

__all__ = [
    "Estimate",
    "reward_model_agreement",
    "evaluate_answers",
    "held_out",
    "lines",
    "lm_eval_scores",
    "majority_at",
    "page",
    "pass_at",
    "why_unanswerable",
]
