"""Section `lora`: low-rank adapters instead of full training."""

from __future__ import annotations

from typing import Literal

from mrl.families.adapters import LoRA
from mrl.options.base import BelowOne, PositiveFloat, PositiveInt, Section


class LoRAConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): a frozen weight W becomes W + scale * B A, and only A and B are
    trained. A critic's score head is trained in full."""

    rank: PositiveInt = 16  # rows of A, columns of B
    alpha: PositiveFloat = 32.0  # scale = alpha / rank
    # linear layers by Hugging Face name, such as [q_proj, v_proj]; all-linear: all of the decoder, including experts
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    rslora: bool = False  # scale = alpha / sqrt(rank) (arXiv 2312.03732)
    dora: bool = False  # also train the magnitude of every row (DoRA, arXiv 2402.09353)
    # dropout of the adapters' inputs in training; sft only
    dropout: BelowOne = 0.0
    # initialization of A; B is 0. kaiming: uniform within 1 / sqrt(input size); gaussian: normal with standard
    # deviation 1 / rank
    init: Literal["kaiming", "gaussian"] = "kaiming"

    @property
    def spec(self) -> LoRA:
        """The settings as a LoRA, for packages that do not depend on the configuration."""
        targets = (self.targets,) if isinstance(self.targets, str) else self.targets
        return LoRA(self.rank, self.alpha, targets, self.rslora, self.dora)
