"""Policy losses by name. Each is a sum over tokens of weight * loss.

The weights carry the global denominator of the mini-batch (`mrl.algo.aggregate.token_weights`), so the sum over any
split into micro-batches or ranks, and its gradient, equals that of the whole. A loss of whole responses spreads its
value and gradient over their tokens; `Sequences` combines tokens that lie apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from mrl.algo.registry import Registry, arguments
from mrl.algo.sequences import Sequences
from mrl.algo.stats import check_same_shape
from mrl.options.losses import POLICY_LOSSES

F = TypeVar("F", bound=Callable[..., Any])
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class PolicyInputs:
    """Inputs of a policy loss; see `compute` for the shapes."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    sequences: Sequences | None
    chosen: Tensor | None

    @property
    def log_ratio(self) -> Tensor:
        return self.log_probs - self.old_log_probs

    @property
    def bounded_log_ratio(self) -> Tensor:
        """`log_ratio` clamped to +-20: a token beyond that has no gradient.

        verl clamps in vanilla, cispo, sapo and the dppo losses, OpenRLHF in PPO's; TRL, slime, NeMo-RL and the papers
        do not.
        """
        return self.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@dataclass(frozen=True)
class TokenLoss:
    """Per-token results of a policy loss, all of the inputs' shape.

    value: the loss, with its gradient; clipped, clipped_lower: bool, the tokens that the loss clips, and those that its
    second bound clips (see each loss)
    metrics: name -> one number a token, for the metrics that the loss declares with `with_metrics`
    """

    value: Tensor
    clipped: Tensor | None = None
    clipped_lower: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLoss = Callable[..., TokenLoss]  # f(PolicyInputs, its options)
LOSSES: Registry[PolicyLoss] = Registry("policy loss")
# f(loss with its options, inputs, weights, metric weights) -> (loss 0-d, the metrics of every loss [5]) as in
# `compute`; None for unsupported inputs
FusedLoss = Callable[[partial[TokenLoss], PolicyInputs, Tensor, Tensor], tuple[Tensor, Tensor] | None]
FUSED_LOSSES: dict[str, FusedLoss] = {}  # of losses without metrics of their own
COMMON_METRICS = ("clipfrac", "ppo_kl", "clipfrac_lower", "approxkl", "ratio")  # metrics
RESERVED_METRICS = {  # names of metrics that an update has beside its loss's own
    *COMMON_METRICS, "pg_loss", "entropy", "ref_kl", "off_policy_masked", "loss", "loss_zeroed", "epochs", "grad_norm",
    "lr", "skipped", "entropy_coef",
}  # fmt: skip


def with_metrics(*names: str) -> Callable[[F], F]:
    """Decorator that declares the names of a policy loss's own metrics, all of which `TokenLoss.metrics` must hold.

    Raises ValueError for an invalid name, and for one that every update has.
    """
    if wrong := [name for name in names if not (isinstance(name, str) and re.fullmatch(r"[\w./-]+", name))]:
        raise ValueError(f'{wrong[0]!r} is no name of a metric: with_metrics takes such as "gate"')
    if taken := {*names} & RESERVED_METRICS:
        raise ValueError(f"every loss has a metric {', '.join(sorted(taken))}: choose another name")

    def declare(loss: F) -> F:
        loss.__dict__["metrics"] = names
        return loss

    return declare


def of_responses(loss: F) -> F:
    """Decorator of a policy loss whose value or gradient at a token depends on other tokens of the response."""
    loss.__dict__["of_responses"] = True
    return loss


def is_local(loss: str | PolicyLoss) -> bool:
    """Returns True if the loss of a token depends on that token's inputs alone; False for an unregistered function, for
    which it is unknown.

    Raises ValueError for an unknown name.
    """
    return isinstance(loss, str) and "of_responses" not in vars(LOSSES.get(loss))


def metrics_of(loss: str | PolicyLoss) -> tuple[str, ...]:
    """Returns the names of the metrics that `compute` gives for this loss. Raises ValueError for an unknown name."""
    function = LOSSES.get(loss) if isinstance(loss, str) else loss
    return (*COMMON_METRICS, *vars(function).get("metrics", ()))


def compute(
    name: str | PolicyLoss,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    metric_weights: Tensor | None = None,
    sequences: Sequences | None = None,
    chosen: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns (loss 0-d = sum(weights * token loss), metrics 0-d and detached).

    name: a registered loss, or a function such as `mrl.algo.custom` loads. All tensors have one shape, any shape (flat
    [R] in training); gradient flows through `log_probs` only.
    sequences: the response of each token; gspo, geo_mean and vespo need it, and flat [n] tensors
    chosen: bool, the tokens that `mrl.algo.token_choice` picked; clip_cov and kl_cov need it
    options: the loss's own, with the defaults of mrl.options.losses

    The metrics are sums over tokens too, with `metric_weights` (default `weights`). They add up over micro-batches and
    ranks, and are means over tokens if those weights sum to 1 over the mini-batch (token-mean's do):

    clipfrac, clipfrac_lower: tokens that the loss clips, see each loss
    ppo_kl: old - new log-prob, the k1 estimate of the KL divergence (TRL's policykl); approxkl: half its square (TRL)
    ratio: exp(new - old log-prob)
    The last three use log-ratios clamped to +-20, whatever the loss does. The loss's own metrics follow.

    Raises ValueError for an unknown name, shapes that differ, or missing sequences or chosen; TypeError for an unknown
    option.
    """
    loss, metric_weights = _function(name, options), weights if metric_weights is None else metric_weights
    check_same_shape(
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=advantages,
        weights=weights,
        metric_weights=metric_weights,
        chosen=weights if chosen is None else chosen,
    )
    inputs = PolicyInputs(log_probs, old_log_probs.detach(), advantages.detach(), sequences, chosen)
    if isinstance(name, str) and name in FUSED_LOSSES:
        made = FUSED_LOSSES[name](loss, inputs, weights, metric_weights)
        if made is not None:
            return made[0], dict(zip(COMMON_METRICS, made[1].unbind()))
    return _composed(loss, inputs, weights, metric_weights)


def _composed(
    loss: partial[TokenLoss], inputs: PolicyInputs, weights: Tensor, metric_weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes any loss and its metrics operation by operation; results as in `compute`."""
    tokens = loss(inputs)
    metrics = _metrics(inputs.bounded_log_ratio.detach(), tokens, metric_weights)
    own = metrics_of(loss.func)[len(COMMON_METRICS) :]
    if tokens.metrics.keys() != {*own}:
        raise ValueError(f"the loss declares the metrics {[*own]} (with_metrics), and gives {[*tokens.metrics]}")
    return (weights * tokens.value).sum(), metrics


def _function(name: str | PolicyLoss, options: Mapping[str, Any]) -> partial[TokenLoss]:
    """Binds the loss's options, except those that only choose its tokens."""
    if not isinstance(name, str):
        return partial(name, **options)
    loss = LOSSES.get(name)
    return partial(loss, **arguments(loss, POLICY_LOSSES[name].filled(options)))


def _metrics(log_ratio: Tensor, tokens: TokenLoss, weights: Tensor) -> dict[str, Tensor]:
    def total(of: Tensor | None) -> Tensor:
        return weights.new_zeros(()) if of is None else (of.detach() * weights).sum()

    return {
        "clipfrac": total(tokens.clipped),
        "ppo_kl": total(-log_ratio),
        "clipfrac_lower": total(tokens.clipped_lower),
        "approxkl": total(0.5 * log_ratio.square()),
        "ratio": total(log_ratio.exp()),
        **{name: total(value) for name, value in tokens.metrics.items()},
    }
