"""KL divergence from the reference policy: per-token estimators and controllers of the coefficient.

The estimators are John Schulman's k1, k2, k3 (http://joschu.net/blog/kl-approx.html) on tokens sampled from the
policy. Used in the reward, the penalty is a constant; used in the loss, its gradient matters: k2's is that of the
KL divergence when sampling on-policy, k1's has expectation zero, k3's is biased.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, expm1

from mrl.algo.registry import Registry
from mrl.algo.stats import check_same_shape

LOG_RATIO_BOUND = 20.0
K3_BOUND = 10.0

Penalty = Callable[[Tensor, Tensor], Tensor]
PENALTIES: Registry[Penalty] = Registry("KL penalty")


def penalty(name: str, log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor | None = None) -> Tensor:
    """Returns the per-token penalty called `name`, of the arguments' shape; gradient flows through `log_probs` only.

    Names: k1 (kl), abs, k2 (mse), k3 (low_var_kl). With a "+" appended the value is that estimator's and the gradient
    k2's, which is unbiased (straight-through, as in verl).

    old_log_probs: those of the policy that generated the tokens. The penalty is then multiplied by
    exp(log_probs - old_log_probs), which makes k3's value and gradient those of the current policy's KL divergence
    (DeepSeek-V3.2, arXiv 2512.02556; TRL's `use_bias_correction_kl`). Gradient flows through the ratio too. The ratio
    is not clamped, and is per token for every loss (TRL uses the response's ratio where the loss does).

    Raises ValueError for an unknown name or shapes that differ.
    """
    check_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs)
    if old_log_probs is not None:
        check_same_shape(log_probs=log_probs, old_log_probs=old_log_probs)
        return (log_probs - old_log_probs.detach()).exp() * penalty(name, log_probs, ref_log_probs)
    value = PENALTIES.get(name.removesuffix("+"))(log_probs, ref_log_probs.detach())
    if not name.endswith("+"):
        return value
    slope = k2(log_probs, ref_log_probs.detach())
    return value.detach() + (slope - slope.detach())


@PENALTIES.register("k1", "kl")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log p - log p_ref: unbiased, high variance, can be negative."""
    return log_probs - ref_log_probs


@PENALTIES.register("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|log p - log p_ref|."""
    return (log_probs - ref_log_probs).abs()


@PENALTIES.register("k2", "mse")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """0.5 * (log p - log p_ref)^2."""
    return 0.5 * (log_probs - ref_log_probs).square()


@PENALTIES.register("k3", "low_var_kl")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(x) - x - 1 with x = log p_ref - log p: never negative, low variance.

    As in verl, x is clamped to +-20 and the result to +-10: beyond that the gradient is 0. exp(x) - 1 is taken as one
    function, because near x = 0 the difference would be lost to rounding.
    """
    x = (ref_log_probs - log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (expm1(x) - x).clamp(-K3_BOUND, K3_BOUND)


class Controller(Protocol):
    """KL coefficient over the course of a run."""

    value: float

    def update(self, current_kl: float, n_samples: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedController:
    """Constant KL coefficient."""

    def __init__(self, coef: float) -> None:
        self.value = coef

    def update(self, current_kl: float, n_samples: int) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Ignores the checkpoint: the configuration sets a fixed coefficient."""


class AdaptiveController:
    """Adaptive KL coefficient that moves the measured KL towards `target` (arXiv 1909.08593, section 2.2).

    update: value *= 1 + clip(kl / target - 1, +-0.2) * n_samples / horizon_samples. The KL is a mean over responses of
    the penalised quantity; the trainer passes the mean of each response's token mean, as verl does. n_samples is the
    number of responses measured. More than horizon_samples responses count as several updates of at most
    horizon_samples each: with a single update the factor, and then the coefficient, could be 0 or negative from 5 *
    horizon_samples on.
    """

    def __init__(self, coef: float, target: float, horizon_samples: int) -> None:
        if target <= 0 or horizon_samples <= 0:
            raise ValueError(f"target ({target}) and horizon_samples ({horizon_samples}) must be > 0")
        self.value = coef
        self.target = target
        self.horizon_samples = horizon_samples

    def update(self, current_kl: float, n_samples: int) -> None:
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        whole, rest = divmod(n_samples, self.horizon_samples)
        self.value *= (1.0 + error) ** whole * (1.0 + error * rest / self.horizon_samples)

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def make_controller(name: str, *, coef: float, target: float | None, horizon_samples: int | None) -> Controller:
    """Returns the controller called "fixed" or "adaptive".

    Raises ValueError for an unknown name, or if "adaptive" lacks `target` or `horizon_samples`.
    """
    if name == "fixed":
        return FixedController(coef)
    if name == "adaptive":
        if target is None or horizon_samples is None:
            raise ValueError("the adaptive KL controller needs target and horizon_samples")
        return AdaptiveController(coef, target, horizon_samples)
    raise ValueError(f"unknown KL controller {name!r} (known: adaptive, fixed)")
