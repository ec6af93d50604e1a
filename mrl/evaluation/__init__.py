"""Evaluation of a model: likelihood of held-out rows, correct answers, agreement with human preferences."""

from mrl.evaluation.agreed import agreed
from mrl.evaluation.answers import answered, unanswerable
from mrl.evaluation.estimates import Estimate, majority_at, pass_at
from mrl.evaluation.held_out import held_out
from mrl.evaluation.show import lines, page

__all__ = ["Estimate", "agreed", "answered", "held_out", "lines", "majority_at", "page", "pass_at", "unanswerable"]
