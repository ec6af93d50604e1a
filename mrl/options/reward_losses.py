"""The losses of a reward model: a class each, of the keys that this loss alone reads, with its defaults.

The functions are in mrl.algo.reward_losses, by the same names; these keys are their arguments. Names are TRL's.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from mrl.options.base import NonNegativeFloat, Options
from mrl.options.preference import LabelNoise

Form = Literal["pairs", "scores", "lists", "steps"]


class RewardLossOptions(Options):
    """What a loss says of itself, besides its keys."""

    form: ClassVar[Form] = "pairs"  # what a row of the data is

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            REWARD_LOSSES[name] = cls


REWARD_LOSSES: dict[str, type[RewardLossOptions]] = {}  # by reward_model.loss


class Centred(RewardLossOptions):
    """Of the losses that see differences of rewards alone."""

    center_rewards_coefficient: NonNegativeFloat = 0.0  # of the squared sum of a pair's rewards; 0.01 keeps it near 0


class BradleyTerry(Centred, name="bradley_terry"):
    """The chosen response wins with probability sigmoid(difference of the rewards) (arXiv 2203.02155)."""

    label_smoothing: LabelNoise = 0.0  # share of pairs taken to be the wrong way round
    use_margin: bool = False  # every row has a data.margin_key, by which it is to win (Llama 2, arXiv 2307.09288)


class PlackettLuce(Centred, name="plackett_luce"):
    """Of ranked lists: the best is drawn first by softmax of the rewards, then the next of what is left."""

    form: ClassVar[Form] = "lists"


class Pairwise(Centred, name="pairwise"):
    """Of ranked lists: bradley_terry's mean over all pairs of a list that are not tied (arXiv 2203.02155)."""

    form: ClassVar[Form] = "lists"

    label_smoothing: LabelNoise = 0.0  # share of pairs taken to be the wrong way round


class Regression(RewardLossOptions, name="regression"):
    """Of responses with a score: the squared error."""

    form: ClassVar[Form] = "scores"


class Process(RewardLossOptions, name="process"):
    """Of solutions in steps with a label each (arXiv 2305.20050): binary cross-entropy of the score at the end of each
    step."""

    form: ClassVar[Form] = "steps"

    train_on_last_step_only: bool = False  # the labels of the other steps are not looked at
