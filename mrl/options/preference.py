"""Preference losses: one class each, with the keys that this loss alone reads and their defaults.

The functions are in mrl.algo, by the same names; these keys are their arguments. Names are TRL's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mrl.options.base import BelowOne, NonNegativeFloat, Options, PositiveFloat

Problem = tuple[str, str]  # a key, and the mistake
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
LabelNoise = Annotated[float, Field(ge=0, lt=0.5)]


PREFERENCE_LOSSES: dict[str, type[PreferenceOptions]] = {}


class PreferenceOptions(Options):
    """Properties of a preference loss, besides its keys."""

    registry: ClassVar[dict[str, Any]] = PREFERENCE_LOSSES
    is_unpaired: ClassVar[bool] = False  # single responses with a label, not pairs
    uses_reference: ClassVar[bool] = True
    couples_rows: ClassVar[bool] = False  # a row's gradient depends on other rows' sums, not on their number alone
    needs_kl: ClassVar[bool] = False  # an estimate of the KL to the reference, from responses to other prompts
    sums_whole: ClassVar[bool] = False  # sums all tokens alike, without ld_alpha
    rewards_of_means: ClassVar[bool] = False  # rewards use log-probs per token

    weight: PositiveFloat = 1.0  # weight in the sum of the losses

    def problems(self) -> Iterator[Problem]:
        """Yields mistakes that bounds of single keys cannot express."""
        yield from ()


class Temperature(PreferenceOptions):
    """Options of losses with a temperature of 0.1."""

    beta: PositiveFloat = 0.1  # larger values keep the policy closer to the reference


class FDivergence(Temperature):
    """Options of losses that compare two log-ratios, possibly those of another divergence (arXiv 2309.16240)."""

    # divergence from the reference that defines the rewards; reverse_kl: the log-ratios themselves
    f_divergence_type: Divergence = "reverse_kl"
    f_alpha_divergence_coef: PositiveFloat = 0.5  # alpha of alpha_divergence

    def problems(self) -> Iterator[Problem]:
        alpha = type(self).model_fields["f_alpha_divergence_coef"].default
        if self.f_divergence_type != "alpha_divergence" and self.f_alpha_divergence_coef != alpha:
            yield "f_alpha_divergence_coef", f"has no effect: the divergence is {self.f_divergence_type}"


class Sigmoid(FDivergence, name="sigmoid"):
    """DPO (arXiv 2305.18290); with label_smoothing conservative DPO, with reference_free CPO."""

    label_smoothing: LabelNoise = 0.0  # assumed share of pairs with swapped labels


class Robust(FDivergence, name="robust"):
    """Robust DPO (arXiv 2403.00409): unbiased if a known share of the pairs has swapped labels."""

    label_smoothing: LabelNoise = 0.0  # that share


class Hinge(FDivergence, name="hinge"):
    """SLiC's hinge loss (arXiv 2305.10425) on the normalized likelihoods."""


class IPO(FDivergence, name="ipo"):
    """IPO (arXiv 2310.12036): squared distance of the log-ratios per token from 1 / (2 beta); beta is the paper's
    tau."""


class SigmoidNorm(FDivergence, name="sigmoid_norm"):
    """Length-normalized DPO (Tulu 3, arXiv 2411.15124): log-ratios per token."""

    beta: PositiveFloat = 5.0  # larger values keep the policy closer to the reference


class EXOPair(FDivergence, name="exo_pair"):
    """EXO on pairs (arXiv 2402.00856): the reverse KL to the preferences."""

    label_smoothing: Annotated[float, Field(gt=0, lt=0.5)] = 1e-3  # smoothing; the preferences must not be 0 or 1


class NCAPair(Temperature, name="nca_pair"):
    """Noise contrastive alignment (arXiv 2402.05369), which also uses the chosen response's likelihood by itself."""


class BCOPair(Temperature, name="bco_pair"):
    """Binary classification of both halves (arXiv 2404.04656), without a shift, as in TRL."""


class SPPOHard(Temperature, name="sppo_hard"):
    """SPPO (arXiv 2405.00675) with win rates of 0 and 1."""


class AOT(Temperature, name="aot"):
    """Distributional alignment (arXiv 2406.05882): the pairs' margins, sorted, against the reference's."""

    couples_rows: ClassVar[bool] = True

    label_smoothing: LabelNoise = 0.0  # assumed share of pairs with swapped labels


class AOTUnpaired(Temperature, name="aot_unpaired"):
    """Distributional alignment (arXiv 2406.05882): all chosen log-ratios, sorted, against all rejected."""

    couples_rows: ClassVar[bool] = True

    label_smoothing: LabelNoise = 0.0  # assumed share of pairs with swapped labels


class APOZero(Temperature, name="apo_zero"):
    """Anchored (arXiv 2408.06266): chosen responses become likelier, rejected ones less likely."""


class APODown(Temperature, name="apo_down"):
    """Anchored (arXiv 2408.06266): both become less likely, the rejected ones more so."""


class DiscoPOP(FDivergence, name="discopop"):
    """DiscoPOP (arXiv 2406.08414): a loss that a language model discovered."""

    discopop_tau: PositiveFloat = 0.05  # temperature of its mixture of logistic and exponential loss


class SFT(PreferenceOptions, name="sft"):
    """Negative log-likelihood per token of the chosen responses, to add to other losses (RPO, MPO, CPO, ORPO)."""

    uses_reference: ClassVar[bool] = False
    sums_whole: ClassVar[bool] = True

    with_prompt: bool = False  # also of their prompts, without the first token, as in TRL's ORPO


class SimPO(PreferenceOptions, name="simpo"):
    """SimPO (arXiv 2405.14734), without a reference: log-probs per token and a margin. AlphaPO (arXiv 2501.03884)."""

    uses_reference: ClassVar[bool] = False
    sums_whole: ClassVar[bool] = True
    rewards_of_means: ClassVar[bool] = True

    beta: PositiveFloat = 2.0  # scale of the log-probs per token
    simpo_gamma: NonNegativeFloat = 1.0  # margin; 0.3 to 0.5 of beta
    alpha: float = 0.0  # AlphaPO's shape of the reward; 0: the log-probs themselves
    label_smoothing: LabelNoise = 0.0  # assumed share of pairs with swapped labels


class ORPO(Temperature, name="orpo"):
    """ORPO's odds ratio (arXiv 2403.07691), without a reference; the paper's full loss also has `sft`."""

    uses_reference: ClassVar[bool] = False
    sums_whole: ClassVar[bool] = True
    rewards_of_means: ClassVar[bool] = True


class Unpaired(Temperature):
    """Options of losses on labeled responses."""

    is_unpaired: ClassVar[bool] = True
    sums_whole: ClassVar[bool] = True


class KTO(Unpaired, name="kto"):
    """KTO (arXiv 2402.01306): each response against an estimate of the KL to the reference."""

    needs_kl: ClassVar[bool] = True

    desirable_weight: PositiveFloat = 1.0  # weight of responses with a true label
    undesirable_weight: PositiveFloat = 1.0  # weight of the others


class APOZeroUnpaired(Unpaired, name="apo_zero_unpaired"):
    """KTO with 0 as the KL estimate."""

    desirable_weight: PositiveFloat = 1.0  # weight of responses with a true label
    undesirable_weight: PositiveFloat = 1.0  # weight of the others


class BCO(Unpaired, name="bco"):
    """BCO (arXiv 2404.04656): binary classification with the moving average of the mean reward as threshold."""

    couples_rows: ClassVar[bool] = True

    shift_decay: BelowOne = 0.9  # decay of that average per step
