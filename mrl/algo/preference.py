"""Preference losses on pairs: functions of the summed log-probs of whole responses and of their lengths.

P pairs, each of a chosen and a rejected response to one prompt. D is a response's log-ratio, policy - reference, and d
the margin, D(chosen) - D(rejected) for the reverse KL. Every loss returns [P]; the caller averages it over the step's
pairs. All values and gradients stay finite where log-ratios differ by hundreds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mrl.algo.registry import Registry, arguments
from mrl.algo.stats import check_same_shape
from mrl.options.preference import PREFERENCE_LOSSES

MOST_EXPONENT = 80.0  # e^80 is still a float32
LEAST_LOSS = 1e-7  # nats a token: a response of probability 1 has infinite odds


@dataclass(frozen=True)
class LogProbSums:
    """Summed log-probs of some responses, [P] each, at temperature 1.

    policy, reference: sums of the log-probs of a response's tokens; tokens: their number, 1 or more
    Raises ValueError for shapes that differ.
    """

    policy: Tensor
    reference: Tensor
    tokens: Tensor

    def __post_init__(self) -> None:
        check_same_shape(policy=self.policy, reference=self.reference, tokens=self.tokens)

    @property
    def ratio(self) -> Tensor:
        """Log-ratio D, [P]."""
        return self.policy - self.reference

    @property
    def mean(self) -> Tensor:
        """Mean log-prob a token under the policy, [P]."""
        return self.policy / self.tokens


@dataclass(frozen=True)
class PreferencePairs:
    """The pairs of a step.

    Attributes:
        text [P]: summed log-probs of the text that `sft` trains on: the chosen response, with or without its prompt
        text_tokens: 0-d, number of tokens of that text over all pairs
    """

    chosen: LogProbSums
    rejected: LogProbSums
    text: Tensor
    text_tokens: Tensor


PairLoss = Callable[..., Tensor]
PAIR_LOSSES: Registry[PairLoss] = Registry("pair loss")


def dpo_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    reference_free: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Direct preference optimization (DPO, arXiv 2305.18290) and related losses, in TRL's form.

    Args:
        policy_chosen_logps: The policy's summed log-probs of the chosen responses [pairs].
        policy_rejected_logps: The policy's of the rejected responses [pairs].
        reference_chosen_logps: The reference's of the chosen responses [pairs]; no gradient flows into it.
        reference_rejected_logps: The reference's of the rejected responses [pairs]; no gradient flows into it.
        beta: Strength of the pull to the reference.
        label_smoothing: Assumed share of pairs with swapped labels; 0 is the loss's default.
        loss_type: A loss of `PAIR_LOSSES`, by TRL's name. OpenRLHF's ipo=True is "ipo". Pass log-probs per token, not
            sums, to ipo, sigmoid_norm, simpo, orpo and sft, as TRL does.
        reference_free: Takes a uniform reference in the loss, whatever reference is given.
        **options: The loss's other options, such as f_divergence_type; see mrl.options.preference.

    Returns:
        (losses, chosen_rewards, rejected_rewards), [pairs] each. OpenRLHF's loss is the mean of the losses. Rewards are
        beta * (policy - reference), without gradient.

    Raises:
        ValueError: For an unknown loss type or shapes that differ.
        TypeError: For an option that the loss lacks.
    """
    loss = PAIR_LOSSES.get(loss_type)
    if "weight" in options:  # an option of the trainer, which sums several losses
        raise TypeError("dpo_loss has no option weight: multiply the losses that it returns")
    sides = (policy_chosen_logps, reference_chosen_logps), (policy_rejected_logps, reference_rejected_logps)
    check_same_shape(chosen=policy_chosen_logps, rejected=policy_rejected_logps)
    chosen, rejected = (
        LogProbSums(policy, torch.zeros_like(policy) if reference_free else reference.detach(), torch.ones_like(policy))
        for policy, reference in sides
    )
    given = options | ({"beta": beta} if loss_type != "sft" else {})
    given |= {"label_smoothing": label_smoothing} if label_smoothing else {}
    settings = arguments(loss, PREFERENCE_LOSSES[loss_type].filled(given))
    text_tokens = torch.tensor(policy_chosen_logps.numel(), device=policy_chosen_logps.device)
    losses: Tensor = loss(PreferencePairs(chosen, rejected, policy_chosen_logps, text_tokens), **settings)
    chosen_rewards, rejected_rewards = (beta * (policy - reference).detach() for policy, reference in sides)
    return losses, chosen_rewards, rejected_rewards


def reward(ratio: Tensor, f_divergence_type: str = "reverse_kl", f_alpha_divergence_coef: float = 0.5) -> Tensor:
    """Returns f'(e^D), without terms that cancel in a difference, for the f-divergence from the reference (arXiv
    2309.16240), [P].

    Exponents stop at 80, beyond which the gradient is 0. Raises ValueError for an unknown divergence.
    """
    if f_divergence_type == "reverse_kl":
        return ratio
    if f_divergence_type == "forward_kl":
        return 1 - (-ratio).clamp(max=MOST_EXPONENT).exp()
    if f_divergence_type == "js_divergence":
        return math.log(2) + logsigmoid(ratio)
    if f_divergence_type == "alpha_divergence":
        power = f_alpha_divergence_coef - 1
        return ratio if power == 0 else ((power * ratio).clamp(max=MOST_EXPONENT).exp() - 1) / power
    raise ValueError(f"unknown f-divergence {f_divergence_type!r}")


def margin(
    t: PreferencePairs, f_divergence_type: str, f_alpha_divergence_coef: float, per_token: bool = False
) -> Tensor:
    """Returns the chosen response's reward minus the rejected one's, [P]. per_token: each is divided by its length."""
    chosen, rejected = (
        reward(side.ratio, f_divergence_type, f_alpha_divergence_coef) / (side.tokens if per_token else 1)
        for side in (t.chosen, t.rejected)
    )
    return chosen - rejected


@PAIR_LOSSES.register("sigmoid")
def sigmoid(
    t: PreferencePairs, beta: float, label_smoothing: float, f_divergence_type: str, f_alpha_divergence_coef: float
) -> Tensor:
    """[P]: -log sigmoid(beta d), smoothed as in cDPO."""
    return _smoothed(beta * margin(t, f_divergence_type, f_alpha_divergence_coef), label_smoothing)


@PAIR_LOSSES.register("robust")
def robust(
    t: PreferencePairs, beta: float, label_smoothing: float, f_divergence_type: str, f_alpha_divergence_coef: float
) -> Tensor:
    """[P]: cDPO's loss made unbiased under a share `label_smoothing` of flipped pairs."""
    x = beta * margin(t, f_divergence_type, f_alpha_divergence_coef)
    return ((label_smoothing - 1) * logsigmoid(x) + label_smoothing * logsigmoid(-x)) / (1 - 2 * label_smoothing)


@PAIR_LOSSES.register("hinge")
def hinge(t: PreferencePairs, beta: float, f_divergence_type: str, f_alpha_divergence_coef: float) -> Tensor:
    """[P]: max(0, 1 - beta d)."""
    return (1 - beta * margin(t, f_divergence_type, f_alpha_divergence_coef)).relu()


@PAIR_LOSSES.register("ipo")
def ipo(t: PreferencePairs, beta: float, f_divergence_type: str, f_alpha_divergence_coef: float) -> Tensor:
    """[P]: (d per token - 1 / (2 beta))^2."""
    return (margin(t, f_divergence_type, f_alpha_divergence_coef, per_token=True) - 1 / (2 * beta)).square()


@PAIR_LOSSES.register("sigmoid_norm")
def sigmoid_norm(t: PreferencePairs, beta: float, f_divergence_type: str, f_alpha_divergence_coef: float) -> Tensor:
    """[P]: -log sigmoid(beta d), with d per token."""
    return -logsigmoid(beta * margin(t, f_divergence_type, f_alpha_divergence_coef, per_token=True))


@PAIR_LOSSES.register("exo_pair")
def exo_pair(
    t: PreferencePairs, beta: float, label_smoothing: float, f_divergence_type: str, f_alpha_divergence_coef: float
) -> Tensor:
    """[P]: KL(q || (1 - e, e)), q = (sigmoid(beta d), sigmoid(-beta d)), equation 16."""
    x = beta * margin(t, f_divergence_type, f_alpha_divergence_coef)
    first = x.sigmoid() * (logsigmoid(x) - math.log1p(-label_smoothing))
    return first + (-x).sigmoid() * (logsigmoid(-x) - math.log(label_smoothing))


@PAIR_LOSSES.register("nca_pair")
def nca_pair(t: PreferencePairs, beta: float) -> Tensor:
    """[P]: -log s(x_c) - (log s(-x_c) + log s(-x_r)) / 2, with x = beta D and s the sigmoid."""
    chosen, rejected = beta * t.chosen.ratio, beta * t.rejected.ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


@PAIR_LOSSES.register("bco_pair")
def bco_pair(t: PreferencePairs, beta: float) -> Tensor:
    """[P]: -log sigmoid(beta D_c) - log sigmoid(-beta D_r)."""
    return -logsigmoid(beta * t.chosen.ratio) - logsigmoid(-beta * t.rejected.ratio)


@PAIR_LOSSES.register("sppo_hard")
def sppo_hard(t: PreferencePairs, beta: float) -> Tensor:
    """[P]: squared distances of the log-ratios from +-1 / (2 beta)."""
    return (t.chosen.ratio - 0.5 / beta).square() + (t.rejected.ratio + 0.5 / beta).square()


@PAIR_LOSSES.register("aot")
def aot(t: PreferencePairs, beta: float, label_smoothing: float) -> Tensor:
    """[P], by rank: the policy's sorted margins minus the reference's sorted margins."""
    ours, theirs = t.chosen.policy - t.rejected.policy, t.chosen.reference - t.rejected.reference
    return _smoothed(beta * (ours.sort().values - theirs.sort().values), label_smoothing)


@PAIR_LOSSES.register("aot_unpaired")
def aot_unpaired(t: PreferencePairs, beta: float, label_smoothing: float) -> Tensor:
    """[P], by rank: the sorted chosen log-ratios minus the sorted rejected ones."""
    return _smoothed(beta * (t.chosen.ratio.sort().values - t.rejected.ratio.sort().values), label_smoothing)


@PAIR_LOSSES.register("apo_zero")
def apo_zero(t: PreferencePairs, beta: float) -> Tensor:
    """[P], equation 7."""
    return (-beta * t.chosen.ratio).sigmoid() + (beta * t.rejected.ratio).sigmoid()


@PAIR_LOSSES.register("apo_down")
def apo_down(t: PreferencePairs, beta: float) -> Tensor:
    """[P], equation 8."""
    return (beta * t.chosen.ratio).sigmoid() + (beta * (t.rejected.ratio - t.chosen.ratio)).sigmoid()


@PAIR_LOSSES.register("discopop")
def discopop(
    t: PreferencePairs, beta: float, discopop_tau: float, f_divergence_type: str, f_alpha_divergence_coef: float
) -> Tensor:
    """[P]: logistic and exponential loss, mixed by sigmoid(x / tau), x = beta d."""
    x = beta * margin(t, f_divergence_type, f_alpha_divergence_coef)
    exponential = (logsigmoid(x / discopop_tau) - x).clamp(max=MOST_EXPONENT).exp()  # e^-x alone would overflow
    return exponential - (-x / discopop_tau).sigmoid() * logsigmoid(x)


@PAIR_LOSSES.register("sft")
def sft(t: PreferencePairs) -> Tensor:
    """[P]: scaled so that the mean is the texts' negative log-likelihood over all their tokens."""
    return -t.text * (t.text.numel() / t.text_tokens)


@PAIR_LOSSES.register("simpo")
def simpo(t: PreferencePairs, beta: float, simpo_gamma: float, alpha: float, label_smoothing: float) -> Tensor:
    """[P]: -log sigmoid(beta (r_c - r_r) - gamma), r = (1 - p^-alpha) / alpha of the mean probability p per token, log
    p at alpha 0.
    """
    chosen, rejected = (
        x if alpha == 0 else (1 - (-alpha * x).clamp(max=MOST_EXPONENT).exp()) / alpha
        for x in (t.chosen.mean, t.rejected.mean)
    )
    return _smoothed(beta * (chosen - rejected) - simpo_gamma, label_smoothing)


@PAIR_LOSSES.register("orpo")
def orpo(t: PreferencePairs, beta: float) -> Tensor:
    """[P]: -beta log sigmoid of the log of the odds ratio."""
    return -beta * logsigmoid(log_odds_ratio(t))


def log_odds_ratio(t: PreferencePairs) -> Tensor:
    """Returns log of odds(chosen) / odds(rejected), [P], with odds = p / (1 - p) of the mean probability per token."""
    chosen, rejected = (side.mean.clamp(max=-LEAST_LOSS) for side in (t.chosen, t.rejected))
    return (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))


def _smoothed(x: Tensor, share: float) -> Tensor:
    return -(1 - share) * logsigmoid(x) - share * logsigmoid(-x)


def _log1mexp(x: Tensor) -> Tensor:
    """Returns log(1 - e^x) for x < 0."""
    near, far = x.clamp(min=-1.0), x.clamp(max=-0.5)  # each branch within its own range, also in the gradient
    return torch.where(x > -math.log(2), (-near.expm1()).log(), (-far.exp()).log1p())
