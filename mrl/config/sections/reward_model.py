"""What a reward model is trained to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import TypeAdapter

from mrl.config.sections.base import PositiveInt
from mrl.config.sections.variants import Variants
from mrl.options.reward_losses import REWARD_LOSSES, RewardLossOptions

if TYPE_CHECKING:
    RewardLossName = str
else:
    RewardLossName = Literal[(*REWARD_LOSSES,)]


class RewardModelTrainingConfig(RewardLossOptions):
    """The loss, which brings the keys that it alone reads, and the score head, which takes the place of the output
    layer. The score is that of a text's last token."""

    # of pairs; of ranked lists: plackett_luce, pairwise; of responses with a score; of steps with labels: process
    loss: RewardLossName = "bradley_terry"
    heads: PositiveInt | None = None  # an ensemble on one body; null: as many as the checkpoint's head has, else 1
    # null: the checkpoint's where model.path has one, else zero; normal: of deviation 1 / sqrt(hidden size + 1)
    head_start: Literal["zero", "normal", "checkpoint"] | None = None

    @property
    def uses_margin(self) -> bool:
        return bool(self.options.get("use_margin"))

    @property
    def options(self) -> dict[str, Any]:
        """The keys that this loss alone reads, with their values."""
        return {name: dict(self)[name] for name in REWARD_LOSSES[self.loss].model_fields}


RewardModelTraining = Annotated[RewardModelTrainingConfig, Variants("loss", "loss", REWARD_LOSSES)]


def reward_model_training(**keys: Any) -> RewardModelTrainingConfig:
    """The section that a file with these keys has. Raises ValidationError."""
    found: RewardModelTrainingConfig = TypeAdapter(RewardModelTraining).validate_python(keys)
    return found
