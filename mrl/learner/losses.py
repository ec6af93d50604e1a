"""Training losses as sums over response tokens, built once a mini-batch from flat vectors.

Each takes the model's output at some tokens and those tokens' indices into the step's flat vectors (`dest`), where it
looks up all per-token inputs on the model's device. The weights hold the global denominator of the mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrl import platform
from mrl.algo import Sequences, custom, kl, off_policy_mask, policy_loss, value_loss
from mrl.algo.policy_loss import PolicyLoss
from mrl.config.schema import KLConfig, PolicyLossConfig, ValueLossConfig
from mrl.learner.loss_terms import Distillation, Loss, LossParts
from mrl.models.batch import PassOptions
from mrl.options.losses import CustomLoss


@dataclass(frozen=True)
class PolicyTargets:
    """Flat [R] vectors of a step. `old_log_probs` None: the update is on-policy, so the ratio is 1.

    weights: sum a token loss to the configured aggregate; mean_weights: to the mean over the mini-batch's tokens
    policy_weights: `weights` times the factors of the policy loss alone (importance weights, token selection)
    kl_weights: `weights` times the factors of the KL term; None: `weights`
    sampling_log_probs: the engine's, if off-policy responses are masked
    sequences: the response of each token; chosen: bool, the tokens that the loss treats differently
    """

    advantages: Tensor
    policy_weights: Tensor
    weights: Tensor
    mean_weights: Tensor
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    sampling_log_probs: Tensor | None = None
    kl_weights: Tensor | None = None
    sequences: Sequences | None = None
    chosen: Tensor | None = None

    def to(self, device: torch.device) -> PolicyTargets:
        """Moves each vector to the device."""
        return replace(self, **{name: x.to(device) for name, x in vars(self).items() if x is not None})


POLICY_SUMS = ("actor/pg_loss", "actor/entropy", "actor/ref_kl")  # followed by the loss's own metrics
OFF_POLICY_MASKED = "actor/off_policy_masked"  # share of the tokens


def policy(cfg: PolicyLossConfig, kl_cfg: KLConfig, kl_coef: float, targets: PolicyTargets) -> Loss:
    """Returns the policy loss - entropy_coef * entropy + kl_coef * KL(actor, ref)."""
    t = targets.to(platform.device())
    masks = t.sampling_log_probs is not None
    which, options = chosen_loss(cfg)
    of_loss = policy_loss.metrics_of(which)

    def compute(output: Tensor, dest: Tensor) -> LossParts:
        log_probs, entropy = output[0], output[1]
        weights, mean = t.weights[dest], t.mean_weights[dest]
        old_log_probs = log_probs.detach() if t.old_log_probs is None else t.old_log_probs[dest]
        kept = _kept(cfg.off_policy_mask_threshold, t, log_probs, dest)
        loss, metrics = policy_loss.compute(
            which,
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            advantages=t.advantages[dest],
            weights=t.policy_weights[dest] * kept,
            metric_weights=mean,
            sequences=None if t.sequences is None else t.sequences.at(dest),
            chosen=None if t.chosen is None else t.chosen[dest],
            **options,
        )
        pg_loss = loss.detach()
        if cfg.entropy_coef:
            loss = loss - cfg.entropy_coef * (weights * entropy).sum()
        ref_kl = torch.zeros((), device=loss.device)
        if t.ref_log_probs is not None:
            drawn_by = old_log_probs if kl_cfg.bias_correction else None
            penalty = kl.penalty(kl_cfg.penalty, log_probs, t.ref_log_probs[dest], drawn_by)
            ref_kl = (mean * penalty.detach()).sum()
            if kl_cfg.use_in_loss:
                loss = loss + kl_coef * ((weights if t.kl_weights is None else t.kl_weights[dest]) * penalty).sum()
        masked = [(mean * ~kept).sum()] if masks else []
        of_policy = [pg_loss, (mean * entropy.detach()).sum(), ref_kl]
        return LossParts(loss, [*of_policy, *(metrics[name] for name in of_loss), *masked])

    names = (*POLICY_SUMS, *(f"actor/{name}" for name in of_loss))
    local = policy_loss.is_local(which) and not masks
    return Loss(compute, (*names, OFF_POLICY_MASKED) if masks else names, local=local)


def chosen_loss(cfg: PolicyLossConfig) -> tuple[str | PolicyLoss, dict[str, Any]]:
    """Returns the loss and the options for `policy_loss.compute`.

    Raises FunctionError for a user-defined loss that cannot be used.
    """
    if isinstance(cfg, CustomLoss):
        return custom.load_custom_loss(cfg.function, cfg.options), {}
    return cfg.loss_mode, cfg.own_options


def _kept(threshold: float | None, t: PolicyTargets, log_probs: Tensor, dest: Tensor) -> Tensor:
    """Returns the tokens [n] bool that the off-policy mask leaves to the policy loss."""
    if threshold is None or t.sampling_log_probs is None or t.sequences is None:
        return torch.ones_like(dest, dtype=torch.bool)
    return off_policy_mask.keep(
        log_probs=log_probs.detach(),
        sampling_log_probs=t.sampling_log_probs[dest],
        advantages=t.advantages[dest],
        sequences=t.sequences.at(dest),
        threshold=threshold,
    )


def distilled(loss: Loss, distillation: Distillation, means: Mapping[str, Tensor]) -> Loss:
    """Returns a policy loss plus the weighted sum of the divergences to the teachers.

    means: metric -> weights [R] that sum the divergences to their mean over some tokens
    """
    weights = _on_device(distillation.weights)
    of_means = {name: _on_device(some) for name, some in means.items()}

    def compute(output: Tensor, dest: Tensor) -> LossParts:
        parts, divergence = loss.compute(output, dest), output[-1]
        sums = [(some[dest] * divergence.detach()).sum() for some in of_means.values()]
        return LossParts(parts.loss + (weights[dest] * divergence).sum(), [*parts.sums, *sums])

    return replace(loss, compute=compute, sums=(*loss.sums, *of_means), distillation=distillation)


def _on_device(vector: Tensor) -> Tensor:
    return vector.to(platform.device())


def value(cfg: ValueLossConfig, old_values: Tensor, returns: Tensor, weights: Tensor, mean_weights: Tensor) -> Loss:
    """Returns the clipped squared error to the returns (`mrl.algo.value_loss`).

    All tensors are flat [R], as in PolicyTargets.
    """
    old_values, returns, weights, mean_weights = map(_on_device, (old_values, returns, weights, mean_weights))

    def compute(output: Tensor, dest: Tensor) -> LossParts:
        loss, metrics = value_loss.compute(
            values=output[0],
            old_values=old_values[dest],
            returns=returns[dest],
            weights=weights[dest],
            metric_weights=mean_weights[dest],
            cliprange_value=cfg.cliprange_value,
        )
        mean_value = (mean_weights[dest] * output[0].detach()).sum()
        return LossParts(loss, [metrics["vf_clipfrac"], mean_value])

    return Loss(compute, ("critic/clipfrac", "critic/value_mean"))


def ptx(weights: Tensor, coef: float) -> Loss:
    """Returns coef * the negative log-likelihood of the response tokens, added to another loss (InstructGPT's PPO-ptx,
    arXiv 2203.02155). weights [R]. The metric omits the coefficient.
    """
    weights = _on_device(weights)

    def compute(output: Tensor, dest: Tensor) -> LossParts:
        loss = -(weights[dest] * output[0]).sum()
        return LossParts(coef * loss, [loss.detach()])

    return Loss(compute, ("ptx/loss",), local=True)


def cross_entropy(weights: Tensor, noise: float = 0.0, seed: int = 0) -> Loss:
    """Returns the negative log-likelihood of the response tokens (supervised fine-tuning), nats; weights [R] sum a
    token loss.

    noise: NEFTune's alpha, 0: none; seed: of that noise and of the adapters' dropout
    """
    return _imitation(
        weights, lambda output: -output[0], PassOptions(noise=noise, drops=True, seed=seed), is_other=False
    )


def smoothed_cross_entropy(weights: Tensor, smoothing: float, noise: float = 0.0, seed: int = 0) -> Loss:
    """Returns `cross_entropy` with label smoothing over all tokens (Szegedy et al., arXiv 1512.00567); weights [R].

    The metric actor/nll is without smoothing.
    """
    extras = PassOptions(smoothing=True, noise=noise, drops=True, seed=seed)
    return _imitation(weights, lambda output: -(1 - smoothing) * output[0] - smoothing * output[2], extras)


def dft(weights: Tensor, noise: float = 0.0, seed: int = 0) -> Loss:
    """Returns the dynamic fine-tuning loss (arXiv 2508.05629): each token's negative log-likelihood times its detached
    probability.

    Other arguments are those of `cross_entropy`; the metric actor/nll omits the probability. weights [R].
    """
    extras = PassOptions(noise=noise, drops=True, seed=seed)
    return _imitation(weights, lambda output: -output[0].detach().exp() * output[0], extras)


def _imitation(
    weights: Tensor, of_token: Callable[[Tensor], Tensor], extras: PassOptions, is_other: bool = True
) -> Loss:
    """is_other: the loss differs from the negative log-likelihood, which is then a metric."""
    weights = _on_device(weights)

    def compute(output: Tensor, dest: Tensor) -> LossParts:
        w = weights[dest]
        entropy, nll = (w * output[1].detach()).sum(), -(w * output[0].detach()).sum()
        return LossParts((w * of_token(output)).sum(), [entropy, nll] if is_other else [entropy])

    names = ("actor/entropy", "actor/nll") if is_other else ("actor/entropy",)
    return Loss(compute, names, extras=extras, local=not extras.smoothing)
