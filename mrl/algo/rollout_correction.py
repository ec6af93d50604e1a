"""Rollout correction: importance weights and rejections for the mismatch between the engine's policy and the trainer's.

With lr = the trainer's log-prob of a token, by the policy at the start of the step, - the engine's: importance weights
exp(lr) multiply the policy loss, and tokens or responses with too large a |lr| can be rejected. Nothing here carries a
gradient. Names and conventions are verl's. Where old log-probs are the trainer's, the token weights make a clipped loss
the decoupled one (AReaL, arXiv 2505.24298): clipping around the proximal policy, weighted by proximal / behaviour.

Weights leave the loss's denominators unchanged. Rejected tokens leave the denominators, as if the policy had not
generated them: pass `keep` as the response mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, expm1

from mrl.algo.sequences import Sequences
from mrl.algo.stats import check_same_shape

LOG_RATIO_BOUND = 20.0
GEOMETRIC_EPS = 1e-10
LEVELS = ("token", "sequence")
GAP_METRICS = (
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "log_ppl_diff_max",
    "log_ppl_diff_min",
    "ppl_ratio",
    "chi2_token",
    "chi2_seq",
)
CRITERIA = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)


@dataclass(frozen=True)
class Correction:
    """Correction of a step's policy loss; its tensors have the shape of the inputs.

    weights: factors of the loss, None: all 1; keep bool: False for rejected tokens; metrics: rejected and truncated
    fractions, and distances between the two policies
    """

    weights: Tensor | None
    keep: Tensor
    metrics: dict[str, float]


@dataclass(frozen=True)
class Criterion:
    """Rejection criterion: the statistic `name` is above `upper`, or, for k1, outside [log lower, log upper].

    token_*: per token, and rejects that token; seq_sum_*, seq_mean_*, seq_max_*: per response, and rejects all of it.
    k1 = -lr (so the bounds of a k1 are of engine / trainer, as in verl), k2 = lr^2 / 2, k3 = exp(lr) - 1 - lr.
    """

    name: str
    lower: float
    upper: float

    def __post_init__(self) -> None:
        if self.name not in CRITERIA:
            raise ValueError(f"unknown rejection criterion {self.name!r} (known: {', '.join(CRITERIA)})")

    def holds(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """Returns the tokens that the criterion keeps, [B, T] bool."""
        level, kind = self.name.rsplit("_", 1)
        values = _over(level, _statistic(kind, log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)), mask)
        if kind == "k1":
            return (values >= math.log(self.lower)) & (values <= math.log(self.upper))
        return values <= self.upper


def _statistic(kind: str, log_ratio: Tensor) -> Tensor:
    if kind == "k1":
        return -log_ratio
    return 0.5 * log_ratio.square() if kind == "k2" else expm1(log_ratio) - log_ratio


def _over(level: str, values: Tensor, mask: Tensor) -> Tensor:
    """Returns [B, T]: `values` for "token", otherwise the response's value at each of its tokens."""
    if level == "token":
        return values
    if level == "seq_max":
        whole = values.masked_fill(~mask, -torch.inf).amax(1, keepdim=True)
    else:
        whole = values.masked_fill(~mask, 0).sum(1, keepdim=True)
        whole = whole / mask.sum(1, keepdim=True).clamp(min=1) if level == "seq_mean" else whole
    return whole.expand_as(values)


def correct(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    level: str | None = None,
    lower: float | None = None,
    upper: float = 2.0,
    batch_normalize: bool = False,
    criteria: Sequence[Criterion] = (),
) -> Correction:
    """Returns `importance_weights` if a level is given, `reject` if criteria are, and the metrics of both and of `gap`.

    log_probs: the trainer's at the start of the step; rollout_log_probs: the engine's; all [B, T].
    """
    mask, weights = mask.bool(), None
    log_ratio, metrics = log_probs - rollout_log_probs, gap(log_probs, rollout_log_probs, mask)
    keep, rejected = reject(log_ratio, mask, criteria) if criteria else (mask, {})
    metrics |= rejected
    if level is not None:
        weights, cut = importance_weights(
            log_ratio, mask, level=level, lower=lower, upper=upper, batch_normalize=batch_normalize
        )
        metrics |= cut
    return Correction(weights, keep, metrics)


def reject(log_ratio: Tensor, mask: Tensor, criteria: Sequence[Criterion]) -> tuple[Tensor, dict[str, float]]:
    """Returns (the mask's tokens that all criteria keep, [B, T] bool; metrics). log_ratio, mask [B, T].

    rollout_rs_masked_fraction: rejected tokens of all; rollout_rs_seq_masked_fraction: responses with a rejected token
    of all responses with tokens; rollout_rs_NAME_masked_fraction: tokens that this criterion rejects, of all.
    """
    mask = mask.bool()
    check_same_shape(log_ratio=log_ratio, mask=mask)
    keep, metrics = mask.clone(), {}
    for criterion in criteria:
        kept = criterion.holds(log_ratio, mask)
        metrics[f"rollout_rs_{criterion.name}_masked_fraction"] = _mean(mask & ~kept, mask)
        keep &= kept
    responses = mask.any(1)
    metrics["rollout_rs_masked_fraction"] = _mean(mask & ~keep, mask)
    metrics["rollout_rs_seq_masked_fraction"] = _mean((mask & ~keep).any(1), responses)
    return keep, metrics


def importance_weights(
    log_ratio: Tensor, mask: Tensor, *, level: str, lower: float | None, upper: float, batch_normalize: bool = False
) -> tuple[Tensor, dict[str, float]]:
    """Returns (weights [B, T], 0 outside the mask; metrics). log_ratio, mask [B, T].

    level: "token": exp(lr) of each token; "sequence": exp(sum of lr) of its response, on all its tokens. The exponent
    is clamped to +-20.
    lower None: weights above `upper` become `upper` (truncated importance sampling, TIS); else weights outside
    [lower, upper] become 0 (IcePop). upper=inf truncates nothing.
    batch_normalize: the weights are then divided by their mean over tokens or over responses.

    Metrics: rollout_is_mean, _min, _max, of the weights before truncation; rollout_is_eff_sample_size, mean(w)^2 /
    mean(w^2) of those after, between 0 and 1; rollout_is_ratio_fraction_high, _low: tokens with a truncated weight;
    rollout_is_seq_mean, _std, _min, _max, _max_deviation (from 1): of the responses' mean weights before truncation.
    """
    mask = mask.bool()
    check_same_shape(log_ratio=log_ratio, mask=mask)
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r} of importance weights (known: {', '.join(LEVELS)})")
    exponent = _over("token" if level == "token" else "seq_sum", log_ratio, mask)
    raw = exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().masked_fill(~mask, 0)
    high = mask & (raw > upper)
    low = mask & (raw < lower) if lower is not None else torch.zeros_like(mask)
    weights = raw.clamp(max=upper) if lower is None else raw.masked_fill(high | low, 0)
    metrics = _weight_metrics(raw, weights, mask) | {
        "rollout_is_ratio_fraction_high": _mean(high, mask),
        "rollout_is_ratio_fraction_low": _mean(low, mask),
    }
    if batch_normalize:
        share = mask.to(raw.dtype)
        share = share if level == "token" else share / share.sum(1, keepdim=True).clamp(min=1)
        mean = (weights * share).sum() / share.sum().clamp(min=1e-8)
        weights = torch.where(mean > 0, weights / mean, weights)
        metrics["rollout_is_batch_norm_factor"] = float(mean)
    return weights, metrics


def geometric_means(weights: Tensor, sequences: Sequences) -> Tensor:
    """Returns the geometric mean of the response's weights [n] at each token, [n], for a loss with one ratio per
    response.

    As in verl's geo_mean a weight of 0 counts as 1e-10, so that one token does not zero the others.
    """
    return sequences.mean((weights + GEOMETRIC_EPS).log()[None])[0].exp()


def _weight_metrics(raw: Tensor, weights: Tensor, mask: Tensor) -> dict[str, float]:
    inside = raw[mask] if bool(mask.any()) else raw.new_zeros(1)
    return {
        "rollout_is_mean": _mean(raw, mask),
        "rollout_is_max": float(inside.max()),
        "rollout_is_min": float(inside.min()),
        "rollout_is_eff_sample_size": effective_sample_size(weights, mask),
        **_of_responses(raw, mask),
    }


def _of_responses(weights: Tensor, mask: Tensor) -> dict[str, float]:
    """Statistics of the responses' mean weights; 1 if there is no response."""
    means = _over("seq_mean", weights.double(), mask)[:, 0][mask.any(1)]
    means = means if means.numel() else means.new_ones(1)
    return {
        "rollout_is_seq_mean": float(means.mean()),
        "rollout_is_seq_std": float(means.std()) if means.numel() > 1 else 0.0,
        "rollout_is_seq_min": float(means.min()),
        "rollout_is_seq_max": float(means.max()),
        "rollout_is_seq_max_deviation": float((means - 1).abs().max()),
    }


def effective_sample_size(weights: Tensor, mask: Tensor) -> float:
    """Returns Kish's effective sample size as a fraction of the mask's tokens: mean(w)^2 / mean(w^2); 1 for equal
    weights, 0 for all 0.
    """
    square = _mean(weights.double().square(), mask)
    return _mean(weights.double(), mask) ** 2 / square if square > 0 else 0.0


def mismatch(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """Returns the distance of the trainer's log-probs from the engine's over the mask. All inputs have one shape, any
    shape.

    mean_abs, max_abs: of the difference; kl: mean of engine - trainer, the k1 estimate of KL(engine || trainer), and
    k3_kl, the k3 estimate; ess: effective sample size of the token weights trainer / engine, between 0 and 1.
    """
    check_same_shape(log_probs=log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    log_ratio = (log_probs.double() - rollout_log_probs.double()).masked_fill(~mask, 0)
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        "mean_abs": _mean(log_ratio.abs(), mask),
        "max_abs": float(log_ratio.abs().max()) if log_ratio.numel() else 0.0,
        "kl": _mean(-log_ratio, mask),
        "k3_kl": _mean(_statistic("k3", bounded), mask),
        "ess": effective_sample_size(bounded.exp(), mask),
    }


def gap(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """Returns verl's metrics of the gap between the trainer's policy and the engine's. All inputs are [B, T].

    Responses without tokens are left out; all metrics are 0 if no response has tokens.
    training_ppl, rollout_ppl: means over responses of exp(-mean log-prob), the perplexity; *_log_ppl: of its logarithm
    log_ppl_diff, _abs_diff, _max, _min: of log(training / rollout perplexity) of each response; ppl_ratio: mean of that
    ratio; chi2_token, chi2_seq: mean(w^2) - 1, w the importance weight of a token, of a response; the exponents are
    clamped to +-20
    """
    check_same_shape(log_probs=log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    mask = mask.bool()
    some = mask.any(1)
    if not bool(some.any()):
        return dict.fromkeys(GAP_METRICS, 0.0)
    training, rollout = (_over("seq_mean", x.double(), mask)[some, 0] for x in (log_probs, rollout_log_probs))
    difference = rollout - training
    log_ratio = (log_probs.double() - rollout_log_probs.double()).masked_fill(~mask, 0)
    token = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    whole = log_ratio.sum(1)[some].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    values = (
        (-training).exp().mean(),
        (-training).mean(),
        (-rollout).exp().mean(),
        (-rollout).mean(),
        difference.mean(),
        difference.abs().mean(),
        difference.max(),
        difference.min(),
        difference.exp().mean(),
        (2 * token).exp()[mask].mean() - 1,
        (2 * whole).exp().mean() - 1,
    )
    return dict(zip(GAP_METRICS, torch.stack(values).tolist(), strict=True))


def _mean(values: Tensor, mask: Tensor) -> float:
    """Mean over the mask; 0 if it is empty."""
    return float(values.double().masked_fill(~mask, 0).sum() / mask.sum().clamp(min=1))
