"""Section `reward_model` of the trainer of the same name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import TypeAdapter

from mrl.config.sections.variants import Variants
from mrl.options.base import PositiveInt
from mrl.options.reward_losses import REWARD_LOSSES, RewardLossOptions

if TYPE_CHECKING:
    RewardLossName = str
else:
    RewardLossName = Literal[(*REWARD_LOSSES,)]


class RewardModelTrainingConfig(RewardLossOptions):
    """The loss, which adds its own keys, and the score head, which replaces the output layer. The score of a text is
    that of its last token."""

    # bradley_terry: pairs; plackett_luce, pairwise: ranked lists; process: labeled steps; others: scored responses
    loss: RewardLossName = "bradley_terry"
    heads: PositiveInt | None = None  # ensemble of heads on one body; null: those of the checkpoint's head, else 1
    # initial head. null: the checkpoint's if model.path has one, else zero; normal: normal distribution with standard
    # deviation 1 / sqrt(hidden size + 1)
    head_start: Literal["zero", "normal", "checkpoint"] | None = None

    @property
    def uses_margin(self) -> bool:
        return bool(self.options.get("use_margin"))

    @property
    def options(self) -> dict[str, Any]:
        """The keys that only this loss reads, with their values."""
        return {name: dict(self)[name] for name in REWARD_LOSSES[self.loss].model_fields}


RewardModelTraining = Annotated[RewardModelTrainingConfig, Variants("loss", "loss", REWARD_LOSSES)]


def reward_model_training(**keys: Any) -> RewardModelTrainingConfig:
    """Returns the section that a file with these keys has. Raises ValidationError."""
    found: RewardModelTrainingConfig = TypeAdapter(RewardModelTraining).validate_python(keys)
    return found
