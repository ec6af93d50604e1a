"""Preference losses on single responses with a label: functions of the summed log-probs of whole responses.

Every loss returns [B]; the caller averages it over the step's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mrl.algo.preference import LogProbSums
from mrl.algo.registry import Registry


@dataclass(frozen=True)
class LabelledResponses:
    """The rows of a step.

    Attributes:
        responses [B]: log-prob sums of the responses
        desirable [B]: labels of the responses, bool
        kl: 0-d without gradient, for kto
        shift: shift of the rewards (beta * log-ratio), for bco
    """

    responses: LogProbSums
    desirable: Tensor
    kl: Tensor
    shift: float = 0.0


LabelLoss = Callable[..., Tensor]
LABEL_LOSSES: Registry[LabelLoss] = Registry("loss of labelled responses")


def kl_estimate(ratios: Tensor) -> Tensor:
    """Returns the mean of the log-ratios [B] of responses paired with other prompts than their own, 0-d, at least 0."""
    return ratios.detach().mean().clamp(min=0)


@LABEL_LOSSES.register("kto")
def kto(t: LabelledResponses, beta: float, desirable_weight: float, undesirable_weight: float) -> Tensor:
    """[B]: w (1 - sigmoid(+-beta (D - kl)))."""
    x = beta * (t.responses.ratio - t.kl)
    return torch.where(t.desirable, desirable_weight * (-x).sigmoid(), undesirable_weight * x.sigmoid())


@LABEL_LOSSES.register("apo_zero_unpaired")
def apo_zero_unpaired(t: LabelledResponses, beta: float, desirable_weight: float, undesirable_weight: float) -> Tensor:
    """[B]: `kto` with kl 0."""
    x = beta * t.responses.ratio
    return torch.where(t.desirable, desirable_weight * (-x).sigmoid(), undesirable_weight * x.sigmoid())


@LABEL_LOSSES.register("bco")
def bco(t: LabelledResponses, beta: float) -> Tensor:
    """[B]: -log sigmoid(+-(beta D - shift))."""
    x = beta * t.responses.ratio - t.shift
    return -logsigmoid(torch.where(t.desirable, x, -x))


def mean_reward(responses: LogProbSums, desirable: Tensor, beta: float) -> float | None:
    """Returns bco's shift from these rows alone: the mean of both labels' mean rewards; None if one label is missing.
    Shapes as in `LabelledResponses`.
    """
    rewards = beta * responses.ratio.detach()
    if bool(desirable.all()) or not bool(desirable.any()):
        return None
    return float((rewards[desirable].mean() + rewards[~desirable].mean()) / 2)
