"""What preference learning minimises, and against which reference."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mrl.config.sections.base import FilePath, PositiveInt, Section
from mrl.options import preference as losses
from mrl.options.preference import PreferenceOptions


class LossesConfig(Section):
    """The losses that are added up; one at least, each with its keys: {sigmoid: {beta: 0.1}, sft: {weight: 0.2}}. A
    name alone is that loss with its defaults. All are of pairs, or all of responses with a label."""

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
        """Those that there are, by name, in the order of the keys."""
        return {name: loss for name, loss in dict(self).items() if loss is not None}


def _named(value: Any) -> Any:
    return {value: {}} if isinstance(value, str) else value


Losses = Annotated[
    LossesConfig, Field(description="name of a loss | section: {NAME: {its keys}, ...}"), BeforeValidator(_named)
]


class PreferenceConfig(Section):
    """What is minimised: sums of log-probs of whole responses, at temperature 1, in the losses."""

    loss: Losses = LossesConfig(sigmoid=losses.Sigmoid())
    reference_free: bool = False  # the reference gives every response a log-prob of 0, and is not built
    # LD-DPO (arXiv 2409.06411): tokens of a response behind the length of the other one count this much; null: 1
    ld_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    # WPO (arXiv 2406.11827): a pair counts the more, the likelier its responses are to be drawn from the policy
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
        """Whether the prompts of chosen responses are learnt too."""
        return self.loss.sft is not None and self.loss.sft.with_prompt

    @property
    def couples_rows(self) -> bool:
        """Whether all sums of a step must be known before the first gradient."""
        return self.use_weighting or any(loss.couples_rows for loss in self.loss.chosen.values())


class PreferenceRefConfig(Section):
    """The reference policy; built only if a loss asks for it. Layout as the actor's when null.

    frozen: a model of its own. cached: it computes the sums of all rows before the first step, which are kept in the
    run directory, and is let go. refreshed: the actor as it was, see `trainer: rl`; TR-DPO (arXiv 2404.09656).
    """

    policy: Literal["frozen", "cached", "refreshed"] = "frozen"  # whether it is kept, and moves; see the section
    refresh_every_steps: PositiveInt | None = None  # steps from one refresh to the next; refreshed only
    refresh_share: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of the way to the actor; refreshed only
    path: FilePath | None = None  # Hugging Face directory; the actor's initial weights when null
