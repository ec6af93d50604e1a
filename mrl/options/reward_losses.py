"""Reward model losses: one class each, with the keys that this loss alone reads and their defaults.

The functions are in mrl.algo.reward_losses, by the same names; these keys are their arguments. Names are TRL's.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from mrl.options.base import NonNegativeFloat, Options
from mrl.options.preference import LabelNoise

Form = Literal["pairs", "scores", "lists", "steps"]


REWARD_LOSSES: dict[str, type[RewardLossOptions]] = {}  # by reward_model.loss


class RewardLossOptions(Options):
    """Properties of a reward model loss, besides its keys."""

    registry: ClassVar[dict[str, Any]] = REWARD_LOSSES
    form: ClassVar[Form] = "pairs"  # what a row of the data is


class Centred(RewardLossOptions):
    """Options of losses that depend on differences of rewards alone."""

    center_rewards_coefficient: NonNegativeFloat = 0.0  # weight of the squared sum of a pair's rewards, such as 0.01


class BradleyTerry(Centred, name="bradley_terry"):
    """The chosen response wins with probability sigmoid(difference of the rewards) (arXiv 2203.02155)."""

    label_smoothing: LabelNoise = 0.0  # assumed share of pairs with swapped labels
    use_margin: bool = False  # use the required margin in data.margin_key (Llama 2, arXiv 2307.09288)


class PlackettLuce(Centred, name="plackett_luce"):
    """Plackett-Luce loss of ranked lists: the best response is chosen first by a softmax of the rewards, then the next
    of the rest."""

    form: ClassVar[Form] = "lists"


class Pairwise(Centred, name="pairwise"):
    """Pairwise loss of ranked lists: bradley_terry's mean over all untied pairs of a list (arXiv 2203.02155)."""

    form: ClassVar[Form] = "lists"

    label_smoothing: LabelNoise = 0.0  # assumed share of pairs with swapped labels


class Regression(RewardLossOptions, name="regression"):
    """Squared error on scored responses."""

    form: ClassVar[Form] = "scores"


class Process(RewardLossOptions, name="process"):
    """Process reward loss of solutions in labeled steps (arXiv 2305.20050): binary cross-entropy of the score at the
    end of each step."""

    form: ClassVar[Form] = "steps"

    train_on_last_step_only: bool = False  # ignore the labels of the other steps
