"""Policy losses by name. Each is a sum over tokens of weight * loss.

The weights carry the one global denominator of the mini-batch (`mrl.algo.aggregate.token_weights`), so the sum over any
split into micro-batches or ranks, and its gradient, is that of the whole. Where a loss is of whole responses, its value
and gradient are spread over their tokens; `Sequences` brings together what lies apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mrl.algo.registry import Registry
from mrl.algo.sequences import Sequences
from mrl.algo.stats import check_same_shape

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class PolicyInputs:
    """What a loss may use; see `compute`."""

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
        """`log_ratio` clamped to +-20: a token beyond that has no gradient. verl does so in vanilla, cispo, sapo and
        the dppo losses, OpenRLHF in PPO's; TRL, slime, NeMo-RL and the papers do not."""
        return self.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@dataclass(frozen=True)
class TokenLoss:
    """`value` of every token; which tokens the loss clips, and which its second bound (see each loss). bool"""

    value: Tensor
    clipped: Tensor | None = None
    clipped_lower: Tensor | None = None


PolicyLoss = Callable[..., TokenLoss]
LOSSES: Registry[PolicyLoss] = Registry("policy loss")


def compute(
    name: str,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    metric_weights: Tensor | None = None,
    sequences: Sequences | None = None,
    chosen: Tensor | None = None,
    **options: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss 0-d = sum(weights * token loss), metrics 0-d and detached) by the loss called `name`.

    All tensors have one shape, any shape (flat [R] in training); gradient flows through `log_probs` only.
    sequences: which response each token is of; gspo, geo_mean and vespo need it, and flat [n] tensors
    chosen: bool, the tokens that `mrl.algo.token_choice` picked; clip_cov and kl_cov need it
    options: the loss's own, see its docstring

    The metrics are sums over tokens too, with `metric_weights` (default `weights`): they add up over micro-batches and
    ranks, and they are means over tokens if those weights sum to 1 over the mini-batch (token-mean's do):

    clipfrac, clipfrac_lower: tokens that the loss clips, see each loss
    ppo_kl: old - new log-prob, the k1 estimate of the KL divergence (TRL's policykl); approxkl: half its square (TRL)
    ratio: exp(new - old log-prob)
    The last three are of log-ratios clamped to +-20, whatever the loss does.

    Raises ValueError for an unknown name, shapes that differ, or missing sequences or chosen.
    """
    loss = LOSSES.get(name)
    metric_weights = weights if metric_weights is None else metric_weights
    check_same_shape(
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=advantages,
        weights=weights,
        metric_weights=metric_weights,
        chosen=weights if chosen is None else chosen,
    )
    inputs = PolicyInputs(log_probs, old_log_probs.detach(), advantages.detach(), sequences, chosen)
    tokens = loss(inputs, **options)
    return (weights * tokens.value).sum(), _metrics(inputs.bounded_log_ratio.detach(), tokens, metric_weights)


def _metrics(log_ratio: Tensor, tokens: TokenLoss, weights: Tensor) -> dict[str, Tensor]:
    def total(of: Tensor | None) -> Tensor:
        return weights.new_zeros(()) if of is None else (of * weights).sum()

    return {
        "clipfrac": total(tokens.clipped),
        "ppo_kl": total(-log_ratio),
        "clipfrac_lower": total(tokens.clipped_lower),
        "approxkl": total(0.5 * log_ratio.square()),
        "ratio": total(log_ratio.exp()),
    }
