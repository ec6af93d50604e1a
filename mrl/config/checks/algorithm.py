"""Checks of estimators, KL, score settings and dynamic sampling: contradictions, and settings without effect."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.checks.base import changed, without_effect
from mrl.config.checks.reward import OF_A_GROUP, check_function
from mrl.config.problems import Problem
from mrl.config.schema import AlgorithmConfig, RefConfig, RLConfig, ValueLossConfig
from mrl.config.trainers.rl import needs_ref, prompts_per_round
from mrl.options.estimators import GDPO, CustomEstimator, Whitening

ESTIMATOR, WHITENS = "algorithm.adv_estimator", "algorithm.whiten_advantages"


def check(cfg: RLConfig) -> Iterator[Problem]:
    yield from _estimator(cfg)
    yield from _gdpo(cfg)
    yield from _scores(cfg)
    yield from _filter_groups(cfg)


def check_kl(cfg: RLConfig) -> Iterator[Problem]:
    kl, key = cfg.algorithm.kl, "algorithm.kl"
    on = f"{key}.use_in_reward" if kl.use_in_reward else f"{key}.use_in_loss"
    if not needs_ref(cfg):
        names = ["coef", "penalty", "bias_correction", "controller", "target", "horizon_samples"]
        because = "use_in_reward and use_in_loss are both false"
        yield from without_effect(kl, key, names, because, f"{key}.use_in_reward")
        yield from without_effect(cfg.ref, "ref", list(RefConfig.model_fields), "no KL term uses a reference model", on)
        return
    if kl.use_in_reward and kl.use_in_loss:
        yield Problem((f"{key}.use_in_reward", f"{key}.use_in_loss"), "the penalty would count twice: choose one")
    if kl.use_in_reward and kl.penalty.endswith("+"):
        message = f"{kl.penalty} differs from {kl.penalty[:-1]} only in its gradient: use {kl.penalty[:-1]} in a reward"
        yield Problem((f"{key}.penalty", f"{key}.use_in_reward"), message)
    if not kl.use_in_loss:
        because = "the penalty in the reward is that of the rollout policy"
        yield from without_effect(kl, key, ["bias_correction"], because, f"{key}.use_in_loss")
    elif kl.bias_correction and kl.penalty.endswith("+"):
        message = f"{kl.penalty} already has an unbiased gradient: use {kl.penalty[:-1]}"
        yield Problem((f"{key}.bias_correction", f"{key}.penalty"), message)
    if kl.coef == 0:
        yield Problem((f"{key}.coef", on), "0 disables the KL term that is enabled: set a coefficient")
    if kl.controller == "fixed":
        names = ["target", "horizon_samples"]
        yield from without_effect(kl, key, names, "the controller is fixed", f"{key}.controller")
        return
    for name in ("target", "horizon_samples"):
        if not changed(kl, name):
            yield Problem((f"{key}.{name}", f"{key}.controller"), "required by the adaptive controller")
    if kl.use_in_loss:
        message = "adaptive needs the KL penalty in the reward: with use_in_loss, set controller: fixed"
        yield Problem((f"{key}.controller", f"{key}.use_in_loss"), message)


def check_files(cfg: RLConfig) -> Iterator[Problem]:
    """Checks that the files define a group filter and a custom estimator; parses the files, without running them."""
    algorithm, function = cfg.algorithm, cfg.algorithm.filter_groups.function
    if function is not None:
        yield from check_function("algorithm.filter_groups.function", function, OF_A_GROUP)
    if isinstance(algorithm, CustomEstimator):
        own = algorithm.advantage
        yield from check_function("algorithm.advantage.function", own.function, ("inputs",), named=[*own.options])


def _estimator(cfg: RLConfig) -> Iterator[Problem]:
    algorithm, name = cfg.algorithm, cfg.algorithm.adv_estimator
    because = f"the estimator is {name}"
    if isinstance(algorithm, Whitening) and not algorithm.whiten_advantages:
        yield from without_effect(algorithm, "algorithm", ["whiten_shift_mean"], "advantages are not whitened", WHITENS)
    if algorithm.takes_values == "always" and cfg.critic is None:
        message = f"{name} needs a critic: add a `critic:` section (`critic: {{}}` for its defaults)"
        yield Problem((ESTIMATOR, "critic"), message)
    if algorithm.takes_values == "never" and cfg.critic is not None:
        yield Problem(("critic", ESTIMATOR), f"has no effect: {because}, which uses no values")
    if algorithm.takes_values == "never" and algorithm.value_loss != ValueLossConfig():
        yield Problem(("algorithm.value_loss", ESTIMATOR), f"has no effect: {because}, which has no value loss")
    if algorithm.takes_values == "maybe" and cfg.critic is None and algorithm.value_loss != ValueLossConfig():
        yield Problem(("algorithm.value_loss", "critic"), "has no effect: there is no critic")
    if cfg.batch.samples_per_prompt == 1 and algorithm.compares_group:
        message = f"1 sample per prompt has no group to be compared with: {name} needs at least 2"
        yield Problem(("batch.samples_per_prompt", ESTIMATOR), message)


def _gdpo(cfg: RLConfig) -> Iterator[Problem]:
    algorithm = cfg.algorithm
    if not isinstance(algorithm, GDPO):
        return
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if not keys:
        yield Problem(("algorithm.gdpo_reward_keys", ESTIMATOR), "required by gdpo: name the components of the reward")
    if len(set(keys)) < len(keys):
        yield Problem(("algorithm.gdpo_reward_keys",), "names a component twice")
    if weights is not None and keys and len(weights) != len(keys):
        message = f"{len(weights)} weights for {len(keys)} components"
        yield Problem(("algorithm.gdpo_reward_weights", "algorithm.gdpo_reward_keys"), message)
    if weights and not any(weights):
        yield Problem(("algorithm.gdpo_reward_weights",), "all weights are 0: set at least one above 0")
    if algorithm.kl.use_in_reward:
        message = "has no effect: gdpo uses the components of the reward only: set use_in_loss instead"
        yield Problem(("algorithm.kl.use_in_reward", ESTIMATOR), message)
    if algorithm.pf_ppo is None or (algorithm.score_clip is None and not _is_drawn_by_centred_scores(algorithm)):
        because = "gdpo uses components of the reward, not the score"
        names = ["use_score_scaling", "use_score_norm", "score_clip"]
        yield from without_effect(algorithm, "algorithm", names, because, ESTIMATOR)
    if "score" not in keys and algorithm.pf_ppo is None and not algorithm.filter_groups.is_on:
        because = "gdpo uses components of the reward, and score is not one of gdpo_reward_keys"
        yield from without_effect(cfg.reward, "reward", ["truncated_score"], because, "algorithm.gdpo_reward_keys")


def _scores(cfg: RLConfig) -> Iterator[Problem]:
    algorithm, scaling = cfg.algorithm, "algorithm.use_score_scaling"
    resampling = algorithm.pf_ppo
    if resampling is not None and resampling.reweight_method != "pow":
        because, other = f"samples are reweighted by {resampling.reweight_method}", "algorithm.pf_ppo.reweight_method"
        yield from without_effect(resampling, "algorithm.pf_ppo", ["weight_pow"], because, other)
    if not algorithm.use_score_scaling:
        yield from without_effect(algorithm, "algorithm", ["use_score_norm"], "scores are not scaled", scaling)
        return
    if cfg.agent is not None and algorithm.takes_turns:  # scaled scores count at the end, and not turn by turn
        return
    reads_scale = algorithm.score_clip is not None or algorithm.kl.use_in_reward
    if algorithm.is_scale_free and not reads_scale and not _is_drawn_by_centred_scores(algorithm):
        why, other = "divides by each group's own standard deviation", "algorithm.norm_adv_by_std_in_grpo"
        if isinstance(algorithm, Whitening):
            why, other = "whitens its advantages, which have the same scale whatever that of the scores is", WHITENS
        yield Problem((scaling, other), f"has no effect: {algorithm.adv_estimator} {why}")
    elif algorithm.is_shift_free and algorithm.score_clip is None and not _is_drawn_by_centred_scores(algorithm):
        because = f"{algorithm.adv_estimator} subtracts a mean of its own, so that of the run's scores cancels"
        yield from without_effect(algorithm, "algorithm", ["use_score_norm"], because, ESTIMATOR)


def _is_drawn_by_centred_scores(algorithm: AlgorithmConfig) -> bool:
    """True if pf_ppo draws by |score| ** weight_pow of scores without their mean; the scale of such scores cancels."""
    resampling = algorithm.pf_ppo
    return resampling is not None and resampling.reweight_method == "pow" and algorithm.use_score_norm


def _filter_groups(cfg: RLConfig) -> Iterator[Problem]:
    groups, key = cfg.algorithm.filter_groups, "algorithm.filter_groups"
    if not groups.enable:
        because = "groups with equal values of the metric are not dropped"
        yield from without_effect(groups, key, ["metric"], because, f"{key}.enable")
    if not groups.is_on:
        names = ["prompts_per_round", "max_num_gen_batches", "on_shortage"]
        yield from without_effect(groups, key, names, "no groups are filtered", f"{key}.enable")
        return
    if groups.enable and cfg.batch.samples_per_prompt == 1:
        message = "1 sample per prompt: every group has equal values and would be dropped: use at least 2"
        yield Problem(("batch.samples_per_prompt", f"{key}.enable"), message)
    most = prompts_per_round(cfg) * groups.max_num_gen_batches
    if most < cfg.batch.prompts_per_step:
        message = (
            f"{prompts_per_round(cfg)} prompts x {groups.max_num_gen_batches} rounds = {most} cannot fill the "
            f"{cfg.batch.prompts_per_step} groups of a step"
        )
        yield Problem((f"{key}.prompts_per_round", f"{key}.max_num_gen_batches", "batch.prompts_per_step"), message)
    elif prompts_per_round(cfg) < cfg.batch.prompts_per_step:
        message = f"{prompts_per_round(cfg)} groups started at once are fewer than the {cfg.batch.prompts_per_step} of "
        message += "a step, and only dropped groups are replaced: leave it out, or raise it"
        yield Problem((f"{key}.prompts_per_round", "batch.prompts_per_step"), message)
    if not cfg.data.shuffle:
        message = "a further round would repeat the same prompts: dynamic sampling needs data.shuffle: true"
        yield Problem(("data.shuffle", f"{key}.enable" if groups.enable else f"{key}.function"), message)
