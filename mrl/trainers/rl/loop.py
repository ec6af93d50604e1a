"""PPO, GRPO and their kin: the loop.

prompts -> engine -> score -> log-probs and values -> advantages -> update -> sync -> engine
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from mrl.algo import explained_variance
from mrl.core import Rollout, StepStats
from mrl.learner import losses
from mrl.trainers.rl import distillation, routing
from mrl.trainers.rl.experience import Experience, make_experience, resampled, token_weights
from mrl.trainers.rl.policy_update import check_samples, drop_if_far, policy_targets
from mrl.trainers.rl.run import RLRun
from mrl.trainers.shared.lm_head_quantization_error import lm_head_quantization_error
from mrl.trainers.shared.references import RefreshedReference
from mrl.trainers.shared.updates import named, over_updates


def train_step(run: RLRun, step: int) -> StepStats:
    """Runs one step: sample with the current weights, train on the samples, sync the new weights to the engines."""
    stats, started, restarts = run.checkpointer.new_stats(step + 1), time.monotonic(), run.engine_restarts
    rollout = generate(run, step, stats)
    experience = learn(run, step, rollout, stats)
    publish(run, step, stats)
    log(run, step, stats, experience, rollout, started, restarts)
    return stats


def generate(run: RLRun, step: int, stats: StepStats) -> Rollout:
    """The samples of a step, by the weights that the engines have."""
    with run.phase("rollout", stats):
        rollout, metrics = run.generate(step)
    stats.metrics |= metrics | run.passes.early_metrics(stats.seconds)
    run.callbacks("on_rollout", rollout, step=step)
    return rollout


def learn(run: RLRun, step: int, rollout: Rollout, stats: StepStats) -> Experience:
    """Makes all updates of a step from its samples; returns the experience it has trained on."""
    phase, trains_actor = run.phase, run.trains_actor(step)
    with phase("experience", stats):
        experience, metrics = experience_of(run, rollout, trains_actor)
    stats.metrics |= metrics

    with phase("update", stats):
        stats.metrics |= update(run, experience, trains_actor)
        run.updates.end_of_step(step + 1)
        if isinstance(run.ref, RefreshedReference):
            run.ref.after_step(step + 1)
    stats.metrics |= adapt_kl(run, experience, stats.metrics)
    return experience


def publish(run: RLRun, step: int, stats: StepStats) -> None:
    """Gives the engines the weights that the step has made, while nothing is generated."""
    if run.cfg.rollout.max_staleness:
        trained, began = stats.seconds.get("experience", 0.0) + stats.seconds.get("update", 0.0), time.monotonic()
        with run.phase("rollout", stats):
            run.rest()
        waited = stats.metrics.get("perf/wait_s", 0.0) + time.monotonic() - began
        stats.metrics |= {"perf/train_s": trained, "perf/wait_s": waited}
    if run.trains_actor(step):
        with run.phase("sync", stats):
            stats.metrics |= run.sync_weights(step + 1).metrics()
            stats.metrics |= run.actor.adapters.metrics() if run.actor.adapters is not None else {}
    elif run.memory.needs_weight_sync:
        with run.phase("sync", stats):
            run.sync_again()


def log(
    run: RLRun, step: int, stats: StepStats, experience: Experience, rollout: Rollout, started: float, restarts: int
) -> None:
    """The end of a step, with the validation that is due. started: when it began, by the monotonic clock; restarts: of
    engines before it."""
    cfg = run.cfg
    seconds = time.monotonic() - started
    stats.metrics |= run.speed.metrics(stats, experience.rollout, rollout.num_response_tokens, seconds)
    if (step + 1) % cfg.validation.every_steps == 0 or step + 1 == cfg.run.steps:
        validate(run, step + 1, stats)
    run.go_on()
    stats.metrics |= run.engines | {"rollout/engine_restarts": run.engine_restarts - restarts}
    run.phase.end_of_step(stats)
    run.recorder.log(stats)


def experience_of(run: RLRun, rollout: Rollout, trains_actor: bool) -> tuple[Experience, dict[str, float]]:
    """Returns the experience of a step: its new samples and, with a replay buffer, older ones. Raises MismatchError for
    samples of other weights than the actor's, where its log-probs are known before the first update."""
    cfg, reused = run.cfg, None
    metrics: dict[str, float] = {}
    if run.replay is not None:
        rollout, reused, metrics = run.replay.mix(rollout)
    experience = make_experience(cfg.algorithm, rollout, run.passes.of(rollout), run.kl_controller.value, reused)
    if cfg.teacher is not None and cfg.teacher.divergence == "sampled":
        experience, of_teacher = distillation.with_sampled_divergence(run, cfg.teacher, experience)
        metrics |= of_teacher
    log_probs = experience.trainer_log_probs
    if log_probs is None and not trains_actor:  # no update of the actor will tell
        log_probs, _ = run.actor.log_probs(rollout, cfg.rollout.sampling.temperature)
    if log_probs is not None:
        metrics |= run.mismatch.check(rollout, log_probs, experience.is_new, version=run.version)
    metrics |= routing.before_updates(run, experience)
    if run.replay is not None:
        assert experience.old_log_probs is not None
        run.replay.keep(rollout, reused, experience.old_log_probs)
    return experience, metrics


def update(run: RLRun, exp: Experience, trains_actor: bool) -> dict[str, float]:
    """Runs all epochs and mini-batches of one step, one model after the other; returns metrics combined by
    `over_updates`."""
    made: dict[str, list[dict[str, float]]] = {"critic": [], "actor": []}
    metrics, drawn = dict(exp.metrics), exp
    exp = resampled(run.cfg.algorithm.pf_ppo, drawn, run.cfg.run.seed)
    epochs = run.cfg.batch.epochs_per_step
    if trains_actor:  # first: it finds samples that nothing may be learnt from
        states = distillation.states_of_teachers(run, exp)
        run.memory.begin("actor_update")
        metrics |= lm_head_quantization_error(run.actor, exp.rollout, run.cfg.rollout.sampling.temperature)
        for epoch in range(epochs):
            for sample_ids in run.minibatches(exp.rollout, epoch):
                made["actor"].append(update_actor(run, exp, sample_ids, len(made["actor"]), states))
            if is_far_enough(run.cfg.algorithm.target_kl, made["actor"]):
                epochs = epoch + 1
                break
    if run.critic is not None and run.critic.trainable:
        run.memory.begin("critic_update")
        for epoch in range(epochs):
            made["critic"] += [update_critic(run, exp, some) for some in run.minibatches(exp.rollout, epoch)]
    if run.cfg.algorithm.target_kl is not None:
        metrics["actor/epochs"] = len(made["actor"]) / len(run.minibatches(exp.rollout))
    for role, rows in made.items():
        metrics |= named(role, over_updates(rows)) if rows else {}
    if drawn.values is not None:
        rollout = drawn.rollout
        metrics["critic/explained_variance"] = float(
            explained_variance(rollout.dense(drawn.values), rollout.dense(drawn.returns), rollout.response_mask)
        )
    return metrics


def is_far_enough(target_kl: float | None, updates: list[dict[str, float]]) -> bool:
    """TRL's early stop: looks at the last update of an epoch."""
    return target_kl is not None and bool(updates) and updates[-1]["actor/ppo_kl"] > 1.5 * target_kl


def update_actor(
    run: RLRun, exp: Experience, sample_ids: Sequence[int], number: int, states: distillation.States | None = None
) -> dict[str, float]:
    """Metrics of an update: the gradients, what judges them, and the optimizer's step, which does nothing where loss
    or gradients are not finite. number: how many updates of the step came before. states: what teachers say of the
    samples."""
    cfg, part = run.cfg.algorithm, exp.part(sample_ids)
    targets, policy_loss = policy_targets(run, part, number), cfg.policy_loss.at_step(exp.rollout.step)
    loss = losses.policy(policy_loss, cfg.kl, run.kl_controller.value, targets)
    if run.cfg.teacher is not None and states is not None:
        loss = distillation.distilled(run.cfg.teacher, loss, part.rollout, targets, states[tuple(sample_ids)])
    metrics = run.actor.backward(
        part.rollout,
        range(part.rollout.num_samples),
        loss,
        run.cfg.rollout.sampling.temperature,
        entropy_grad=policy_loss.entropy_coef > 0,
        also=[run.demonstrations.term(exp.rollout.step, number)] if run.demonstrations is not None else [],
    )
    metrics |= routing.after_backward(run) | drop_if_far(run, metrics)
    if number < len(run.minibatches(exp.rollout)):
        metrics |= check_samples(run, part, sample_ids, number)
    metrics |= run.actor.step()
    if policy_loss.entropy_coef_end is not None:
        metrics["actor/entropy_coef"] = policy_loss.entropy_coef
    run.updates.note("actor", run.actor, part.rollout, sample_ids, metrics, part.targets())
    if run.ema is not None and not metrics["skipped"]:
        run.ema.after_update()
    return metrics


def update_critic(run: RLRun, exp: Experience, sample_ids: Sequence[int]) -> dict[str, float]:
    assert run.critic is not None
    cfg, part = run.cfg.algorithm.value_loss, exp.part(sample_ids)
    assert part.values is not None
    scale = cfg.loss_scale_factor or run.cfg.rollout.sampling.max_new_tokens
    weights = token_weights(part.rollout, cfg.loss_agg_mode, scale)
    mean_weights = token_weights(part.rollout, "token-mean")
    loss = losses.value(cfg, part.values, part.returns, weights, mean_weights)
    metrics = run.critic.backward(part.rollout, range(part.rollout.num_samples), loss, temperature=1.0)
    metrics |= run.critic.step()
    run.updates.note("critic", run.critic, part.rollout, sample_ids, metrics, part.targets())
    return metrics


def adapt_kl(run: RLRun, exp: Experience, metrics: dict[str, float]) -> dict[str, float]:
    if run.ref is None:
        return {}
    mean_kl = exp.mean_ref_kl if exp.mean_ref_kl is not None else metrics.get("actor/ref_kl")
    used = run.kl_controller.value
    if mean_kl is None:  # the actor's loss would have told, and it was not trained
        return {"kl/coef": used}
    if math.isfinite(mean_kl):
        run.kl_controller.update(mean_kl, exp.num_new_samples)
    return {"kl/ref": mean_kl, "kl/coef": used}


def validate(run: RLRun, step: int, stats: StepStats | None = None) -> None:
    """Scores held-out prompts; logged with the step's other metrics, or alone before the first step."""
    if run.cfg.data.validation is None:
        return
    alone = stats is None
    stats = stats or StepStats(step)
    run.rest()
    with run.phase("validation", stats):
        stats.metrics |= run.validate(step)
        if not alone and run.cfg.ema is not None and run.cfg.ema.in_validation:
            stats.metrics |= run.validate_average(step)
    run.callbacks("on_evaluate", stats.metrics, step=step)
    if alone:
        run.recorder.log(stats)
