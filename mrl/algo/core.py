"""verl's `core_algos` by name, on dense [batch, response_len] tensors with masks.

To move code over, write `from mrl.algo import core as core_algos`. Names, argument order and results are verl's. The
formulas are those that mrl's trainers use, in the other modules of `mrl.algo`. The import needs torch alone.

A mask is bool or 0/1, may have holes, and its rows may be empty. Values outside it have no influence, not even NaN.
`config` is any object or mapping with verl's keys; keyword arguments take precedence. verl requires a config; here,
missing keys have mrl's defaults. All functions differ from verl's in these points: a loss without tokens is 0, not NaN;
errors are ValueError, or TypeError for an unknown option; no gradient flows into old, reference or target values.

| in verl only | in mrl |
|---|---|
| compute_gdpo_outcome_advantage | `advantages.compute("gdpo", score_parts=...)` |
| compute_optimal_token_baseline_advantage | `advantages.compute("optimal_token_baseline", ...)` |
| compute_multi_turn_optimal_token_baseline_advantage | `advantages.compute("tir_optimal_token_baseline", ...)` |
| compute_policy_loss_reinforce | `compute_policy_loss_gpg`, with loss_agg_mode seq-mean-token-sum |
| compute_policy_loss_bypass_mode | `rollout_correction.correct`, then a policy loss |
| compute_pf_ppo_reweight_data | `resampling.draw` |
| register_policy_loss, register_adv_est | `policy_loss.LOSSES.register`, `advantages.ESTIMATORS.register` |
| compute_policy_loss_up | - |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.algo import advantages as estimators
from mrl.algo import aggregate, group_advantages, kl, log_probs, policy_loss, stats, token_choice, value_loss
from mrl.algo.rollout_correction import geometric_means
from mrl.algo.sequences import Sequences
from mrl.algo.stats import masked_mean, masked_var
from mrl.options.losses import POLICY_LOSSES
from mrl.verl_config import read

__all__ = [
    "AdaptiveKLController", "FixedKLController", "agg_loss", "compute_entropy_loss", "compute_gae_advantage_return",
    "compute_gpg_outcome_advantage", "compute_grpo_outcome_advantage", "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage", "compute_opo_outcome_advantage", "compute_policy_loss",
    "compute_policy_loss_cispo", "compute_policy_loss_clip_cov", "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv", "compute_policy_loss_geo_mean", "compute_policy_loss_gpg",
    "compute_policy_loss_gspo", "compute_policy_loss_kl_cov", "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla", "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage", "compute_remax_outcome_advantage", "compute_rewards",
    "compute_rloo_outcome_advantage", "compute_rloo_vectorized_outcome_advantage", "compute_value_loss",
    "get_kl_controller", "kl_penalty", "kl_penalty_forward", "masked_mean", "masked_var", "masked_whiten",
]  # fmt: skip

Index = Sequence[Any] | Tensor  # prompts' ids, [batch]; a numpy array too
Metrics = dict[str, float]
BOUNDS = ("clip_ratio_low", "clip_ratio_high")  # both are verl's clip_ratio if missing
VERL_NAMES = {"divergence_low": BOUNDS[0], "divergence_high": BOUNDS[1], "dppo_ratio_cap": "clip_ratio_c"}


@torch.no_grad()
def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Whitens values over a mask. Fewer than two values become 0, where verl raises.

    Args:
        values: Tensor of any shape.
        mask: Mask of that shape.
        shift_mean: False adds the mean again afterwards.

    Returns:
        (values - mean) / sqrt(var + 1e-8) in the shape of `values`, 0 outside the mask (verl whitens there too); no
        gradient.
    """
    return stats.whiten(values, mask, shift_mean)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Aggregates a token loss into one number.

    Args:
        loss_mat: Token losses [batch, response_len].
        loss_mask: Mask [batch, response_len].
        loss_agg_mode: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean or seq-mean-token-sum-norm
            (Dr.GRPO, arXiv 2503.20783).
        dp_size: Number of data-parallel ranks over which the caller averages gradients; a factor of the result.
        batch_num_tokens: Tokens of the global batch, the denominator of token-mean; counted in the mask if None.
        global_batch_size: Responses of the global batch, the denominator of the seq-mean modes; if None, the responses
            with a token are counted.
        loss_scale_factor: Divisor of seq-mean-token-sum-norm; response_len if None.

    Returns:
        The aggregate, 0-d.

    Raises:
        ValueError: For an unknown mode, shapes that differ, a count below the mask's own, or dp_size above 1 without
            the count that the mode needs.
    """
    whole = _whole_batch(loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    return aggregate.agg_loss(loss_agg_mode, loss_mat, loss_mask, **whole) * dp_size


def _whole_batch(
    mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> dict[str, Any]:
    """Returns verl's description of the global batch as arguments of `mrl.algo.aggregate`."""
    name = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
    count = batch_num_tokens if mode == "token-mean" else global_batch_size
    if dp_size > 1 and count is None and mode != "token-sum":
        raise ValueError(f"dp_size={dp_size} and loss_agg_mode {mode!r} need {name}, the count over all ranks")
    return {"scale": loss_scale_factor, "tokens": batch_num_tokens, "sequences": global_batch_size}


def _weights(mask: Tensor, dtype: torch.dtype, mode: str, whole: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns the weights of the loss and those of a mean over the mask, of its n tokens each."""
    weights = aggregate.token_weights(mode, mask, **_whole_batch(mode, **whole), dtype=dtype) * whole.get("dp_size", 1)
    return weights[mask], aggregate.token_weights("token-mean", mask, dtype=dtype)[mask]


def _settings(name: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the policy loss by mrl's names, from verl's names in `options` and `config`."""
    sources = (options, config, read(config, "policy_loss"))
    found: dict[str, Any] = {}
    known: list[str] = []
    for key in POLICY_LOSSES[name].model_fields:
        verl_name = VERL_NAMES.get(key, key)
        names = (verl_name, "clip_ratio") if verl_name in BOUNDS else (verl_name,)
        known += names
        values = [value for source in sources for each in names if (value := read(source, each)) is not None]
        if values:
            found[key] = values[0]
    if unknown := sorted(options.keys() - {*known}):
        available = ", ".join(dict.fromkeys(known)) or "none"
        raise TypeError(f"compute_policy_loss_{name} has no option {', '.join(unknown)}; available: {available}")
    return found


def _policy_loss(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    mode: str,
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns (loss 0-d, metrics 0-d by mrl's names) of dense tensors."""
    dense = {"log_probs": log_prob, "old_log_probs": old_log_prob, "advantages": advantages}
    stats.check_same_shape(**dense, response_mask=response_mask)
    mask, kind, settings = response_mask.bool(), POLICY_LOSSES[name], _settings(name, config, options or {})
    sequences = Sequences.of_mask(mask)
    weights, means = _weights(mask, log_prob.dtype, mode, read(config, "global_batch_info") or {})
    if rollout_is_weights is not None:
        factors = rollout_is_weights.detach()[mask]
        weights = weights * (geometric_means(factors, sequences) if kind.one_weight_a_response else factors)
    chosen = None
    if kind.chooses_tokens:
        whole: dict[str, Any] = {**dense, "mask": mask, "generator": torch.default_generator}
        chosen = token_choice.choose(name, **whole, **settings)[mask]
    flat = {key: tensor[mask] for key, tensor in dense.items()}
    return policy_loss.compute(
        name, **flat, weights=weights, metric_weights=means, sequences=sequences, chosen=chosen, **settings
    )


def _named(made: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, Metrics]:
    """Returns the loss with its metrics by verl's names."""
    names = {"clipfrac": "pg_clipfrac", "ppo_kl": "ppo_kl", "clipfrac_lower": "pg_clipfrac_lower"}
    return made[0], {f"actor/{verl_name}": float(made[1][name]) for name, verl_name in names.items()}


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """PPO's clipped surrogate (arXiv 1707.06347) with the dual clip (arXiv 1912.09729), in verl's classic form.

    Args:
        old_log_prob: Log-probs of the old policy [batch, response_len].
        log_prob: Log-probs of the current policy [batch, response_len]; the gradient flows through them alone.
        advantages: Advantages [batch, response_len].
        response_mask: Mask [batch, response_len].
        cliprange: Bound of the ratio on both sides; not needed if both of the following are given.
        cliprange_low: Ratios are clipped at 1 - this.
        cliprange_high: Ratios are clipped at 1 + this.
        clip_ratio_c: Maximum ratio where the advantage is negative.
        loss_agg_mode: Aggregation, see `agg_loss`.

    Returns:
        (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower), 0-d each: the loss, the share of clipped tokens, the mean of
        old - new log-prob, the share of tokens at the dual clip.

    Raises:
        ValueError: For shapes that differ, no clip range, clip_ratio_c of 1 or less, or an unknown mode.
    """
    low, high = (cliprange if bound is None else bound for bound in (cliprange_low, cliprange_high))
    if low is None or high is None:
        raise ValueError("compute_policy_loss needs cliprange, or both cliprange_low and cliprange_high")
    options = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": clip_ratio_c}
    dense = (old_log_prob, log_prob, advantages, response_mask)
    loss, metrics = _policy_loss("vanilla", *dense, loss_agg_mode, options=options)
    return loss, metrics["clipfrac"], metrics["ppo_kl"], metrics["clipfrac_lower"]


def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **options: float,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate (arXiv 1707.06347) with the dual clip (arXiv 1912.09729).

    Options: clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c.

    Args:
        old_log_prob: Log-probs of the old policy [batch, response_len].
        log_prob: Log-probs of the current policy [batch, response_len]; the gradient flows through them alone.
        advantages: Advantages [batch, response_len].
        response_mask: Mask [batch, response_len].
        loss_agg_mode: Aggregation, see `agg_loss`.
        config: Object or mapping with the options, those of single losses in its `policy_loss`, as in verl's
            ActorConfig. Its `global_batch_info` may hold dp_size, batch_num_tokens, global_batch_size and
            loss_scale_factor for `agg_loss`.
        rollout_is_weights: Importance weights [batch, response_len], factors of the token loss.
        **options: The loss's options by name; they take precedence over `config`.

    Returns:
        The loss, 0-d, and means over the mask: actor/pg_clipfrac and actor/pg_clipfrac_lower, the shares of tokens that
        the loss and its second bound clip, and actor/ppo_kl, the mean of old - new log-prob, clamped to +-20 for every
        loss. All losses have these three (in verl, kl_cov reports the mean absolute value, gpg none).

    Raises:
        ValueError: For shapes that differ, an option out of range, or an unknown mode.
        TypeError: For an unknown option.
    """
    dense = (old_log_prob, log_prob, advantages, response_mask)
    return _named(_policy_loss("vanilla", *dense, loss_agg_mode, config, rollout_is_weights, options))


def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **options: float,
) -> tuple[Tensor, Metrics]:
    """GSPO (arXiv 2507.18071): PPO's clip on a response's ratio, the geometric mean of its tokens' ratios.

    Options: clip_ratio, clip_ratio_low, clip_ratio_high. As in verl, the aggregation is always seq-mean-token-mean.
    Arguments, results and errors are those of `compute_policy_loss_vanilla`.
    """
    dense = (old_log_prob, log_prob, advantages, response_mask)
    return _named(_policy_loss("gspo", *dense, "seq-mean-token-mean", config, rollout_is_weights, options))


def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **options: float,
) -> tuple[Tensor, Metrics]:
    """Geometric-mean policy optimization (GMPO, arXiv 2507.20673), with bounds on log-ratios.

    Options: clip_ratio, clip_ratio_low, clip_ratio_high. As in verl, the aggregation is always the mean over responses;
    unlike in verl, responses without a token do not count. Importance weights enter as a response's geometric mean.
    Arguments, results and errors are those of `compute_policy_loss_vanilla`.
    """
    dense = (old_log_prob, log_prob, advantages, response_mask)
    return _named(_policy_loss("geo_mean", *dense, "seq-mean-token-mean", config, rollout_is_weights, options))


def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **options: float,
) -> tuple[Tensor, Metrics]:
    """Soft adaptive policy optimization (SAPO, arXiv 2511.20347): a soft gate in place of a clip.

    Options: tau_pos, tau_neg. As in verl, the aggregation is always seq-mean-token-mean. Arguments, results and errors
    are those of `compute_policy_loss_vanilla`.
    """
    dense = (old_log_prob, log_prob, advantages, response_mask)
    return _named(_policy_loss("sapo", *dense, "seq-mean-token-mean", config, rollout_is_weights, options))


def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **options: float,
) -> tuple[Tensor, Metrics]:
    """Clipped importance weights (CISPO, arXiv 2506.13585): a clipped token keeps its gradient.

    Options: clip_ratio, clip_ratio_low, clip_ratio_high. Arguments, results and errors are those of
    `compute_policy_loss_vanilla`.
    """
    dense = (old_log_prob, log_prob, advantages, response_mask)
    return _named(_policy_loss("cispo", *dense, loss_agg_mode, config, rollout_is_weights, options))


def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **options: float,
) -> tuple[Tensor, Metrics]:
    """The plain policy gradient (GPG, arXiv 2504.02546), without a ratio and without options.

    Arguments, results and errors are those of `compute_policy_loss_vanilla`.
    """
    dense = (old_log_prob, log_prob, advantages, response_mask)
    return _named(_policy_loss("gpg", *dense, loss_agg_mode, config, rollout_is_weights, options))


def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **options: float,
) -> tuple[Tensor, Metrics]:
    """Clip-Cov (arXiv 2505.22617): PPO's clipped surrogate, without gradient for a few tokens of high covariance.

    Options: clip_ratio, clip_ratio_low, clip_ratio_high, clip_cov_ratio, clip_cov_lb, clip_cov_ub. As in verl, torch's
    CPU generator picks the tokens. Arguments, results and errors are those of `compute_policy_loss_vanilla`.
    """
    dense = (old_log_prob, log_prob, advantages, response_mask)
    return _named(_policy_loss("clip_cov", *dense, loss_agg_mode, config, rollout_is_weights, options))


def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **options: float,
) -> tuple[Tensor, Metrics]:
    """KL-Cov (arXiv 2505.22617): no clip; the few tokens of highest covariance get a KL penalty.

    Options: kl_cov_ratio, ppo_kl_coef. Arguments, results and errors are those of `compute_policy_loss_vanilla`.
    """
    dense = (old_log_prob, log_prob, advantages, response_mask)
    return _named(_policy_loss("kl_cov", *dense, loss_agg_mode, config, rollout_is_weights, options))


def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **options: float,
) -> tuple[Tensor, Metrics]:
    """DPPO (arXiv 2602.04879): no gradient for a token whose |p - p_old| is too large in its advantage's direction.

    Options: clip_ratio, clip_ratio_low and clip_ratio_high, bounds of |p - p_old|, and clip_ratio_c, the maximum ratio.
    Arguments, results and errors are those of `compute_policy_loss_vanilla`.
    """
    dense = (old_log_prob, log_prob, advantages, response_mask)
    return _named(_policy_loss("dppo_tv", *dense, loss_agg_mode, config, rollout_is_weights, options))


def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **options: float,
) -> tuple[Tensor, Metrics]:
    """DPPO (arXiv 2602.04879) with KL(p_old || p) of "this token or another" as the distance.

    Options: as in `compute_policy_loss_dppo_tv`, the bounds in nats. Arguments, results and errors are those of
    `compute_policy_loss_vanilla`.
    """
    dense = (old_log_prob, log_prob, advantages, response_mask)
    return _named(_policy_loss("dppo_kl", *dense, loss_agg_mode, config, rollout_is_weights, options))


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped regression loss of the critic (arXiv 1707.06347), half the squared error.

    Args:
        vpreds: The critic's values [batch, response_len]; the gradient flows through them alone.
        returns: Targets [batch, response_len].
        values: Values before the update [batch, response_len].
        response_mask: Mask [batch, response_len].
        cliprange_value: Maximum distance of a clipped value from its old value.
        loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor: See `agg_loss`.

    Returns:
        (vf_loss, vf_clipfrac), 0-d each: the loss, and the share of tokens whose clipped term is the larger one.

    Raises:
        ValueError: As `agg_loss`, and for a clip range that is not positive.
    """
    stats.check_same_shape(vpreds=vpreds, returns=returns, values=values, response_mask=response_mask)
    mask = response_mask.bool()
    whole = {"dp_size": dp_size, "batch_num_tokens": batch_num_tokens, "global_batch_size": global_batch_size}
    weights, means = _weights(mask, vpreds.dtype, loss_agg_mode, whole | {"loss_scale_factor": loss_scale_factor})
    flat = {"values": vpreds[mask], "old_values": values[mask], "returns": returns[mask]}
    loss, metrics = value_loss.compute(**flat, weights=weights, metric_weights=means, cliprange_value=cliprange_value)
    return loss, metrics["vf_clipfrac"]


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Aggregates the entropy of the policy's distributions.

    Args:
        logits: Logits [batch, response_len, vocabulary]; computed in float32 or better.
        response_mask: Mask [batch, response_len].
        loss_agg_mode: Aggregation, see `agg_loss`.

    Returns:
        The aggregate, 0-d, with gradient.

    Raises:
        ValueError: For shapes that do not fit, or an unknown mode.
    """
    labels = torch.zeros(response_mask.shape, dtype=torch.int64, device=logits.device)
    return agg_loss(log_probs.compute(logits, labels)[1], response_mask, loss_agg_mode)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token estimate of the KL divergence from the reference (http://joschu.net/blog/kl-approx.html).

    Args:
        logprob: Log-probs of the policy, any shape; the gradient flows through them alone.
        ref_logprob: Log-probs of the reference in that shape.
        kl_penalty: kl or k1, abs, mse or k2, low_var_kl or k3. A "+" at the end keeps the value and takes the gradient
            of k2, which is unbiased (straight-through). verl's "full" has no form here.

    Returns:
        The estimates in that shape.

    Raises:
        ValueError: For an unknown name or shapes that differ.
    """
    return kl.penalty(kl_penalty, logprob, ref_logprob)


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """`kl_penalty` with the estimator's own gradient; a "+" is ignored. Arguments, results and errors are the same."""
    return kl.penalty(kl_penalty.removesuffix("+"), logprob, ref_logprob)


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Subtracts the KL penalty k1 from token scores (arXiv 1909.08593).

    Args:
        token_level_scores: Scores [batch, response_len].
        old_log_prob: Log-probs of the policy that generated the tokens [batch, response_len].
        ref_log_prob: Log-probs of the reference [batch, response_len].
        kl_ratio: Coefficient of the penalty.

    Returns:
        Rewards [batch, response_len], also outside the response, as in verl; no gradient.

    Raises:
        ValueError: For shapes that differ.
    """
    stats.check_same_shape(token_level_scores=token_level_scores, old_log_prob=old_log_prob)
    return token_level_scores.detach() - kl_ratio * kl.penalty("k1", old_log_prob, ref_log_prob).detach()


class AdaptiveKLController(kl.AdaptiveController):
    """KL coefficient `value` that moves the measured KL towards a target (arXiv 1909.08593, section 2.2).

    An update by more than `horizon` samples counts as several updates, so that the coefficient stays positive; verl's
    can become negative.

    Args:
        init_kl_coef: Coefficient at the start.
        target_kl: Target of the KL.
        horizon: Number of samples over which the coefficient moves by at most 20%.

    Raises:
        ValueError: If target_kl or horizon is not positive.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        super().__init__(init_kl_coef, target_kl, horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adjusts `value` to the KL `current_kl`, measured on `n_steps` samples."""
        super().update(current_kl, n_steps)


class FixedKLController(kl.FixedController):
    """Constant KL coefficient `value`."""

    def __init__(self, kl_coef: float) -> None:
        super().__init__(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing."""


def get_kl_controller(kl_ctrl: Any) -> AdaptiveKLController | FixedKLController:
    """Returns the controller of a config, an object or a mapping.

    Args:
        kl_ctrl: Has type ("fixed" or "adaptive"), kl_coef, and for adaptive target_kl and horizon.

    Returns:
        The controller, with `value` and `update(current_kl, n_steps)`.

    Raises:
        ValueError: For an unknown type or a missing or bad key.
    """
    kind, *numbers = (read(kl_ctrl, name) for name in ("type", "kl_coef", "target_kl", "horizon"))
    needed = {"fixed": 1, "adaptive": 3}.get(kind, 0)
    if not needed or None in numbers[:needed]:
        raise ValueError(f"{kl_ctrl!r} needs type fixed or adaptive, kl_coef, and for adaptive target_kl and horizon")
    return FixedKLController(numbers[0]) if kind == "fixed" else AdaptiveKLController(*numbers)


def _advantages(
    estimator: str | Callable[..., Any], rewards: Tensor, response_mask: Tensor, index: Index | None = None, **more: Any
) -> tuple[Tensor, Tensor]:
    """Computes an estimator of `mrl.algo.advantages`. Responses with equal values in `index` form a group."""
    ids = range(rewards.shape[0]) if index is None else index
    ids = ids.tolist() if hasattr(ids, "tolist") else ids  # tensors would be compared by identity
    numbers: dict[Any, int] = {}
    group = torch.tensor([numbers.setdefault(each, len(numbers)) for each in ids], dtype=torch.int64)
    given = {"token_rewards": rewards, "response_mask": response_mask, "group": group.to(rewards.device)}
    return estimators.compute(estimator, **given, **more)


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438), whitened over the mask.

    Masked tokens inside a response carry the next value through, as in verl. Both results are 0 outside the mask (verl
    leaves whitened values there).

    Args:
        token_level_rewards: Rewards [batch, response_len].
        values: The critic's values [batch, response_len].
        response_mask: Mask [batch, response_len].
        gamma: Discount per token.
        lam: 1 for the whole return, 0 for one step.

    Returns:
        (advantages, returns), [batch, response_len] each, without gradient; returns are those before the whitening.

    Raises:
        ValueError: For shapes that do not fit.
    """
    return _advantages("gae", token_level_rewards, response_mask, values=values, gamma=float(gamma), lam=float(lam))


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage (GRPO, arXiv 2402.03300): (R - mean) / (std + epsilon) on every token of a response.

    A group of one keeps its raw score. Statistics are in float64, so that equal scores give exactly 0.

    Args:
        token_level_rewards: Rewards [batch, response_len]; R is a response's sum.
        response_mask: Mask [batch, response_len].
        index: The prompt of each response [batch]: an array, list or tensor of numbers or strings, such as verl's uid.
        epsilon: Added to the standard deviation.
        norm_adv_by_std_in_grpo: False leaves the division out (Dr.GRPO, arXiv 2503.20783).
        config: Unused, as in verl.

    Returns:
        (advantages, returns), one tensor [batch, response_len], 0 outside the mask, without gradient.

    Raises:
        ValueError: For shapes that do not fit.
    """
    options = {"norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo, "epsilon": epsilon}
    return _advantages(group_advantages.grpo, token_level_rewards, response_mask, index, **options)


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Pass@k (arXiv 2503.19595): only the best response of a group has an advantage, its lead over the second best.

    As in verl, norm_adv_by_std_in_grpo of `config` takes precedence over the argument. Arguments, results and errors
    are those of `compute_grpo_outcome_advantage`; a group of one is a ValueError.
    """
    by_std = read(config, "norm_adv_by_std_in_grpo")
    options = {"norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo if by_std is None else by_std, "epsilon": epsilon}
    return _advantages(group_advantages.grpo_passk, token_level_rewards, response_mask, index, **options)


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, epsilon: float = 1e-6, config: Any = None
) -> tuple[Tensor, Tensor]:
    """REINFORCE leave-one-out (RLOO, arXiv 2402.14740): R minus the mean of the group's other responses.

    A group of one gets 0, as in verl's vectorized form; its other form keeps the score. epsilon and config are unused,
    as in verl. Arguments, results and errors are those of `compute_grpo_outcome_advantage`.
    """
    return _advantages("rloo", token_level_rewards, response_mask, index)


compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage


def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, epsilon: float = 1e-6, config: Any = None
) -> tuple[Tensor, Tensor]:
    """Optimal on-policy baseline (OPO, arXiv 2505.23585): R minus the group's mean, weighted by lengths.

    epsilon and config are unused, as in verl. Arguments, results and errors are those of
    `compute_grpo_outcome_advantage`.
    """
    return _advantages("opo", token_level_rewards, response_mask, index)


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, epsilon: float = 1e-6, config: Any = None
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with the group's mean as its baseline (arXiv 2501.03262), whitened over the mask.

    epsilon and config are unused, as in verl. Arguments, results and errors are those of
    `compute_grpo_outcome_advantage`.
    """
    return _advantages("reinforce_plus_plus_baseline", token_level_rewards, response_mask, index)


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Group policy gradient (GPG, arXiv 2504.02546): alpha * (R - mean) / f_norm.

    As in verl, alpha is computed: the number of responses over that of responses with R other than 0. The arguments
    alpha, epsilon and config are unused. f_norm must be positive. Other arguments, results and errors are those of
    `compute_grpo_outcome_advantage`.
    """
    return _advantages("gpg", token_level_rewards, response_mask, index, gpg_f_norm=f_norm)


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, gamma: float | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262): the discounted reward-to-go, whitened over the mask.

    The sum skips masked tokens inside a response, as `compute_gae_advantage_return` does; verl's starts again there.

    Args:
        token_level_rewards: Rewards [batch, response_len].
        response_mask: Mask [batch, response_len].
        config: Object or mapping with gamma.
        gamma: Discount per token; takes precedence over `config`; 1 without either.
        **kwargs: Unused, as in verl, whose trainer passes `index`.

    Returns:
        (advantages, returns), [batch, response_len] each, 0 outside the mask, without gradient; returns are those
        before the whitening.

    Raises:
        ValueError: For shapes that do not fit.
    """
    discount = read(config, "gamma") if gamma is None else gamma
    discount = 1.0 if discount is None else float(discount)
    return _advantages("reinforce_plus_plus", token_level_rewards, response_mask, gamma=discount)


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """ReMax (arXiv 2310.10505): the reward-to-go minus the score of the greedy response to the same prompt.

    Args:
        token_level_rewards: Rewards [batch, response_len].
        reward_baselines: Scores of the greedy responses [batch].
        response_mask: Mask [batch, response_len].
        config, **kwargs: Unused, as in verl, whose trainer passes `index`.

    Returns:
        (advantages, returns), [batch, response_len] each, 0 outside the mask, without gradient.

    Raises:
        ValueError: For shapes that do not fit.
    """
    return _advantages("remax", token_level_rewards, response_mask, greedy_scores=reward_baselines)
