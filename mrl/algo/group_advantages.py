"""Group-relative estimators: they compare a response with the others of its group, without a critic.

Each reads R, the sum of a response's token rewards, and statistics of the whole group in float64, so that equal scores
differ by exactly 0. A group of one has mean 0, so its response keeps its raw score (as in verl) unless the estimator
says otherwise. No discounting; every token of a response has the same advantage, and returns and advantages are one
tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algo.advantages import ESTIMATORS, AdvantageInputs, whitened
from mrl.kernels.masked import bits, keep, row_groups
from mrl.kernels.native import algo as native

GROUP_STD_EPS = 1e-6


@ESTIMATORS.register("grpo")
def grpo(
    inputs: AdvantageInputs, norm_adv_by_std_in_grpo: bool, epsilon: float = GROUP_STD_EPS
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage (arXiv 2402.03300): (R - mean_G) / (std_G + 1e-6) on every token of the response.

    The standard deviation has ddof 1, that of a group of one is 1. `norm_adv_by_std_in_grpo=False` leaves the division
    out (Dr.GRPO, arXiv 2503.20783). Not whitened.

    Peers: TRL adds 1e-4, OpenRLHF 1e-9, NeMo-RL takes leave-one-out statistics, Megatron-LM ddof 0 and 1e-4.
    """
    return _on_tokens(_Groups(inputs).normalised(norm_adv_by_std_in_grpo, epsilon), inputs)


@ESTIMATORS.register("gdpo")
def gdpo(
    inputs: AdvantageInputs,
    norm_adv_by_std_in_grpo: bool,
    gdpo_reward_weights: tuple[float, ...] | None,
    whiten_advantages: bool,
    whiten_shift_mean: bool,
) -> tuple[Tensor, Tensor]:
    """GDPO (arXiv 2601.05242): the weighted sum of grpo's advantages of each reward component, whitened over the mask.

    A component of small scale counts as much as one of large scale. The token rewards are not read (as in verl), so a
    KL term in them would be lost. Raises ValueError without components, or for a wrong number of weights.
    """
    parts, weights = inputs.score_parts, gdpo_reward_weights
    if parts is None or parts.dim() != 2 or parts.shape[0] != inputs.group.numel() or parts.shape[1] == 0:
        shape = None if parts is None else list(parts.shape)
        raise ValueError(f"advantage estimator 'gdpo' needs score_parts [B, K] with K > 0, got {shape}")
    weights = (1.0,) * parts.shape[1] if weights is None else weights
    if len(weights) != parts.shape[1]:
        raise ValueError(f"gdpo got {len(weights)} part_weights for {parts.shape[1]} score_parts")
    each = [_Groups(inputs, part).normalised(norm_adv_by_std_in_grpo) for part in parts.unbind(1)]
    total = parts.new_tensor(weights, dtype=torch.float64) @ torch.stack(each)
    advantages = whitened(_on_tokens(total, inputs)[0], inputs, whiten_advantages, whiten_shift_mean)
    return advantages, advantages


@ESTIMATORS.register("grpo_passk")
def grpo_passk(
    inputs: AdvantageInputs, norm_adv_by_std_in_grpo: bool, epsilon: float = GROUP_STD_EPS
) -> tuple[Tensor, Tensor]:
    """Pass@k (arXiv 2503.19595): only the best response of a group has an advantage, its lead over the second best.

    The lead is divided by std_G + 1e-6, as in grpo. Raises ValueError for a group of one, which has no second best.
    """
    group = _Groups(inputs)
    if bool((group.count < 2).any()):
        raise ValueError("advantage estimator 'grpo_passk' needs at least 2 responses to each prompt")
    order = torch.argsort(group.scores, descending=True, stable=True)
    order = order[torch.argsort(group.member[order], stable=True)]  # by group, best first
    first = torch.ones_like(order, dtype=torch.bool)
    first[1:] = group.member[order[1:]] != group.member[order[:-1]]
    best = first.nonzero()[:, 0]
    advantage = torch.zeros_like(group.scores)
    advantage[order[best]] = group.scores[order[best]] - group.scores[order[best + 1]]
    return _on_tokens(advantage / (group.std + epsilon) if norm_adv_by_std_in_grpo else advantage, inputs)


@ESTIMATORS.register("rloo")
def rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE leave-one-out (arXiv 2402.14740): R minus the mean of the group's other responses,
    (R - mean_G) * n / (n - 1). A group of one has no baseline and gets 0 (verl's two forms differ there)."""
    group = _Groups(inputs)
    advantage = (group.scores - group.mean) * group.count / (group.count - 1).clamp(min=1)
    return _on_tokens(advantage.masked_fill(group.count == 1, 0), inputs)


@ESTIMATORS.register("opo")
def opo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """OPO, on-policy optimal baseline (arXiv 2505.23585): R - sum_G(len * R) / sum_G(len), len in unmasked tokens."""
    group = _Groups(inputs)
    length = inputs.mask.sum(1).double()
    baseline = group.sum(length * group.scores) / group.sum(length).clamp(min=1)
    return _on_tokens(group.scores - baseline.masked_fill(group.count == 1, 0), inputs)


@ESTIMATORS.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    inputs: AdvantageInputs, whiten_advantages: bool, whiten_shift_mean: bool
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with a group baseline (arXiv 2501.03262): R - mean_G on every token, then whitened over the mask."""
    group = _Groups(inputs)
    advantages, _ = _on_tokens(group.scores - group.mean, inputs)
    advantages = whitened(advantages, inputs, whiten_advantages, whiten_shift_mean)
    return advantages, advantages


@ESTIMATORS.register("gpg")
def gpg(inputs: AdvantageInputs, gpg_f_norm: float) -> tuple[Tensor, Tensor]:
    """Group policy gradient (arXiv 2504.02546): alpha * (R - mean_G) / f_norm with alpha = responses / responses whose
    R is not 0.

    f_norm is a number, as in verl, where it is 1 unless the function is called by hand; the paper's may also be the
    group's standard deviation. Raises ValueError if it is not positive.
    """
    if gpg_f_norm <= 0:
        raise ValueError(f"gpg needs f_norm > 0, got {gpg_f_norm}")
    group = _Groups(inputs)
    alpha = group.scores.numel() / group.scores.count_nonzero().clamp(min=1).double()
    return _on_tokens(alpha * (group.scores - group.mean) / gpg_f_norm, inputs)


class _Groups:
    """Group statistics of every response: scores, mean, std (ddof 1) and count, each [B] float64, and member [B], the
    group's number.

    scores [B]: the sums of the token rewards when None
    """

    def __init__(self, inputs: AdvantageInputs, scores: Tensor | None = None) -> None:
        self.scores = (inputs.token_rewards.sum(1) if scores is None else scores).double()
        numbers, self.member = inputs.group.unique(return_inverse=True)
        self._zeros = self.scores.new_zeros(numbers.numel())
        self.count = self.sum(torch.ones_like(self.scores))
        single = self.count == 1
        mean = self.sum(self.scores) / self.count
        square = self.sum((self.scores - mean).square())
        self.mean = mean.masked_fill(single, 0)
        self.std = (square / (self.count - 1).clamp(min=1)).sqrt().masked_fill(single, 1)

    def normalised(self, by_std: bool, epsilon: float = GROUP_STD_EPS) -> Tensor:
        """Returns grpo's advantage of every response, [B]."""
        centred = self.scores - self.mean
        return centred / (self.std + epsilon) if by_std else centred

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of `values` [B] over each response's group, [B]."""
        return self._zeros.index_add(0, self.member, values)[self.member]


def _on_tokens(advantage: Tensor, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Spreads advantages [B] over the valid tokens of each response; advantages and returns are one tensor."""
    column, mask = advantage.to(inputs.token_rewards.dtype), inputs.mask
    if native.supports(column) and mask.is_contiguous():
        dense = native.on_tokens(column, mask)
        return dense, dense
    dense = torch.empty_like(inputs.token_rewards)
    for rows in row_groups(dense):
        keep(column[rows, None], bits(mask[rows], dense.dtype), out=dense[rows])
    return dense, dense
