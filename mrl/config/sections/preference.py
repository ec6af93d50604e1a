"""Sections `preference` and `ref` of `trainer: dpo`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mrl.options import preference as losses
from mrl.options.base import FilePath, Fraction, PositiveFraction, PositiveInt, Section
from mrl.options.preference import PreferenceOptions


class LossesConfig(Section):
    """The losses, which are summed: at least one, each with its keys: {sigmoid: {beta: 0.1}, sft: {weight: 0.2}}.

    A name alone is that loss with its defaults. All losses use pairs, or all use labeled responses.
    """

    sigmoid: losses.Sigmoid | None = None
    robust: losses.Robust | None = None
    hinge: losses.Hinge | None = None
    ipo: losses.IPO | None = None
    sigmoid_norm: losses.SigmoidNorm | None = None
    exo_pair: losses.EXOPair | None = None
    nca_pair: losses.NCAPair | None = None
    bco_pair: losses.BCOPair | None = None
    sppo_hard: losses.SPPOHard | None = None
    aot: losses.AOT | None = None
    aot_unpaired: losses.AOTUnpaired | None = None
    apo_zero: losses.APOZero | None = None
    apo_down: losses.APODown | None = None
    discopop: losses.DiscoPOP | None = None
    simpo: losses.SimPO | None = None
    orpo: losses.ORPO | None = None
    kto: losses.KTO | None = None
    apo_zero_unpaired: losses.APOZeroUnpaired | None = None
    bco: losses.BCO | None = None
    sft: losses.SFT | None = None

    @property
    def chosen(self) -> dict[str, PreferenceOptions]:
        """The losses that are set, by name, in the order of the keys."""
        return {name: loss for name, loss in dict(self).items() if loss is not None}


def _named(value: Any) -> Any:
    return {value: {}} if isinstance(value, str) else value


Losses = Annotated[
    LossesConfig, Field(description="name of a loss | section: {NAME: {its keys}, ...}"), BeforeValidator(_named)
]


class PreferenceConfig(Section):
    """The preference losses, on summed log-probs of whole responses at temperature 1."""

    loss: Losses = LossesConfig(sigmoid=losses.Sigmoid())
    reference_free: bool = False  # use 0 as the reference's log-probs, and build no reference
    # LD-DPO (arXiv 2409.06411): weight of a response's tokens beyond the length of the other response; null: 1
    ld_alpha: Fraction | None = None
    # WPO (arXiv 2406.11827): weight pairs by the probability of their responses under the policy
    use_weighting: bool = False

    @property
    def is_unpaired(self) -> bool:
        return any(loss.is_unpaired for loss in self.loss.chosen.values())

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free and any(loss.uses_reference for loss in self.loss.chosen.values())

    @property
    def needs_kl(self) -> bool:
        return any(loss.needs_kl for loss in self.loss.chosen.values())

    @property
    def learns_prompts(self) -> bool:
        """True if the prompts of chosen responses are trained too."""
        return self.loss.sft is not None and self.loss.sft.with_prompt

    @property
    def couples_rows(self) -> bool:
        """True if the first gradient needs the log-prob sums of all rows of the step."""
        return self.use_weighting or any(loss.couples_rows for loss in self.loss.chosen.values())


class PreferenceRefConfig(Section):
    """The reference policy; built only if a loss needs it, with the actor's layout.

    frozen: a separate model. cached: the log-probs of all rows are computed before the first step and stored in the run
    directory; then the model is freed. refreshed: an earlier actor, as in `trainer: rl`; TR-DPO (arXiv 2404.09656).
    """

    policy: Literal["frozen", "cached", "refreshed"] = "frozen"  # how the reference is computed; see the section
    refresh_every_steps: PositiveInt | None = None  # steps between refreshes; refreshed only
    refresh_share: PositiveFraction = 1.0  # share of the way to the actor; refreshed only
    path: FilePath | None = None  # Hugging Face directory; null: the actor's initial weights
