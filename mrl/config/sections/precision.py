"""Section `precision`: number format of a model's matrix products."""

from __future__ import annotations

from typing import Literal

from mrl.options.base import NonNegativeInt, PositiveInt, Section

FP8Recipe = Literal["none", "current", "delayed", "blockwise", "mxfp8"]
FP8Format = Literal["hybrid", "e4m3"]


class FP8Config(Section):
    """Matrix products of the layers in fp8, by transformer-engine or emulated; see docs/fp8.md.

    Not affected: embedding, norms, attention core, routers, value heads, gradient sums and the optimizer.
    """

    # granularity of the scales. current: per tensor, from its largest value; delayed: per tensor, from its largest
    # values in earlier updates; blockwise: blocks of 1 x 128 for inputs and gradients, 128 x 128 for weights; mxfp8:
    # blocks of 1 x 32, on Blackwell
    recipe: FP8Recipe = "none"
    # number format. hybrid: e4m3 for inputs and weights, e5m2 for gradients; e4m3: for all three; null: hybrid for
    # current and delayed, e4m3 for blockwise and mxfp8
    format: FP8Format | None = None
    emulate: bool = False  # mrl's own layers round as the recipe does, on any machine, without a speedup
    head: bool = False  # fp8 also in the loss head: hidden states x vocabulary and both gradients; policies only
    params: bool = False  # store weights in fp8 instead of bfloat16; the optimizer keeps float32
    wgrad: bool = True  # fp8 also in the products for weight gradients; false needs recipe: delayed
    first_last_bf16: NonNegativeInt = 0  # layers at each end of the model that stay in model.dtype
    history: PositiveInt = 1024  # length of the amax history, the largest absolute values of a tensor; delayed only
    history_use: Literal["max", "most_recent"] = "max"  # which value of the amax history sets the scale; delayed only
    margin: NonNegativeInt = 0  # headroom between the amax and the format's maximum, in powers of 2; delayed only

    @property
    def is_real(self) -> bool:
        """True if products are computed in fp8 rather than emulated by rounding."""
        return self.recipe != "none" and not self.emulate

    @property
    def shares_buffers(self) -> bool:
        """True if Megatron gathers new weights in the gradient buffer.

        It does so for mxfp8 weights, and then for all weights: it copies from separate float32 main weights. So no
        weight can be its own main weight.
        """
        return self.params and self.recipe == "mxfp8"

    @property
    def chosen_format(self) -> FP8Format:
        return self.format or ("hybrid" if self.recipe in ("current", "delayed") else "e4m3")


class PrecisionConfig(Section):
    """Precision of matrix products, if it differs from model.dtype."""

    fp8: FP8Config = FP8Config()
