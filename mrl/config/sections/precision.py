"""What the products of a model are computed in."""

from __future__ import annotations

from typing import Literal

from mrl.config.sections.base import NonNegativeInt, PositiveInt, Section

FP8Recipe = Literal["none", "current", "delayed", "blockwise", "mxfp8"]
FP8Format = Literal["hybrid", "e4m3"]


class FP8Config(Section):
    """Matrix products of the layers in fp8, by transformer-engine or emulated; see docs/fp8.md. Embedding, norms,
    attention core, routers and value heads are not affected, nor are gradient sums and the optimizer."""

    # granularity of the scales. current: per tensor, from its largest value; delayed: per tensor, from its largest
    # values in earlier updates; blockwise: 1 x 128 of inputs and gradients, 128 x 128 of weights; mxfp8: 1 x 32, on
    # Blackwell
    recipe: FP8Recipe = "none"
    # hybrid: e4m3 for inputs and weights, e5m2 for gradients; e4m3: for all; null: hybrid for current and delayed,
    # e4m3 for blockwise and mxfp8
    format: FP8Format | None = None
    emulate: bool = False  # mrl's own layers round as the recipe does, on any machine, without a speedup
    head: bool = False  # also the loss head: hidden states x vocabulary and both gradients; policies only
    params: bool = False  # store weights in fp8 instead of bfloat16; the optimizer keeps float32
    wgrad: bool = True  # also the products for weight gradients; false: with delayed only
    first_last_bf16: NonNegativeInt = 0  # layers at each end of the model that stay in model.dtype
    history: PositiveInt = 1024  # number of largest values that a scale is based on: delayed only
    history_use: Literal["max", "most_recent"] = "max"  # which of them sets the scale: delayed only
    margin: NonNegativeInt = 0  # distance of scales from the format's maximum, in powers of 2: delayed only

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
    """Precision of matrix products, if it differs from model.dtype."""

    fp8: FP8Config = FP8Config()
