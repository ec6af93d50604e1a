"""What the products of a model are computed in."""

from __future__ import annotations

from typing import Literal

from mrl.config.sections.base import NonNegativeInt, PositiveInt, Section

FP8Recipe = Literal["none", "current", "delayed", "blockwise", "mxfp8"]
FP8Format = Literal["hybrid", "e4m3"]


class FP8Config(Section):
    """The products of the layers' matrices in fp8, by transformer-engine or emulated; see docs/fp8.md. Embedding,
    norms, attention's core, routers and value heads stay as they are, and so do gradients' sums and the optimizer."""

    # what has a scale. current: a tensor, by its largest value; delayed: a tensor, by its largest value in earlier
    # updates; blockwise: 1 x 128 of inputs and gradients, 128 x 128 of weights; mxfp8: 1 x 32, on Blackwell
    recipe: FP8Recipe = "none"
    # hybrid: e4m3 for inputs and weights, e5m2 for gradients; e4m3: for all; null: hybrid for current and delayed,
    # e4m3 for blockwise and mxfp8
    format: FP8Format | None = None
    emulate: bool = False  # mrl's own layers round as the recipe does, on any machine and not faster
    head: bool = False  # the loss head's products too, hidden states x vocabulary and both gradients; policies only
    params: bool = False  # weights are held in fp8, not in bfloat16; the optimizer's stay float32
    wgrad: bool = True  # products for weight gradients too; false: with delayed only
    first_last_bf16: NonNegativeInt = 0  # layers at each end of the model that stay in model.dtype
    history: PositiveInt = 1024  # largest values that a scale follows from: delayed only
    history_use: Literal["max", "most_recent"] = "max"  # which of them it follows from: delayed only
    margin: NonNegativeInt = 0  # powers of 2 that scales stay away from the format's end: delayed only

    @property
    def is_real(self) -> bool:
        """Whether products are in fp8, and not just rounded to it."""
        return self.recipe != "none" and not self.emulate

    @property
    def shares_buffers(self) -> bool:
        """Whether Megatron gathers new weights where gradients were, from float32 main weights that are beside them:
        for weights in mxfp8, and then for all. So none can be its own main weights."""
        return self.params and self.recipe == "mxfp8"

    @property
    def chosen_format(self) -> FP8Format:
        return self.format or ("hybrid" if self.recipe in ("current", "delayed") else "e4m3")


class PrecisionConfig(Section):
    """What products are computed in, where it is not model.dtype."""

    fp8: FP8Config = FP8Config()
