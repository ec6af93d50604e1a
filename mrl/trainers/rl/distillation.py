"""On-policy distillation: what the teachers say of a step's samples, and the actor's loss with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mrl.config.schema import TeacherConfig
from mrl.config.sections.teacher import SOURCES
from mrl.core import Rollout
from mrl.kernels.linear_divergence import Divergence
from mrl.learner import Loss, losses
from mrl.learner.loss_terms import Distillation, TeacherStates
from mrl.trainers.rl.experience import Experience, token_weights
from mrl.trainers.rl.run import RLRun
from mrl.units import RESPONSE_TOKEN

States = Mapping[tuple[int, ...], list[TeacherStates]]  # by the samples of an update


def states_of_teachers(run: RLRun, exp: Experience) -> States | None:
    """Hidden states of each teacher for its samples in every update of the step, one teacher after the other; None
    where there are no teachers, or the advantages have their part already. Collective."""
    cfg = run.cfg.teacher
    if cfg is None or cfg.divergence == "sampled":
        return None
    found: dict[tuple[int, ...], list[TeacherStates]] = {}
    for epoch in range(run.cfg.batch.epochs_per_step):
        found |= {tuple(sample_ids): [] for sample_ids in run.minibatches(exp.rollout, epoch)}
    for name, teacher in run.teachers.items():
        run.memory.begin(name)
        weight = teacher.head_for(run.actor)
        vocab_size = min(teacher.arch.vocab_size, run.actor.arch.vocab_size)
        for sample_ids, states in found.items():
            rollout = exp.part(sample_ids).rollout
            own = _taught(cfg, name, rollout)
            packed = run.actor.planner.micro_batches(rollout, range(rollout.num_samples), only=own)
            samples = own.nonzero().flatten().tolist()
            made = teacher.hidden_states(rollout, samples, packed)
            states += [TeacherStates(made, weight, vocab_size)] if weight is not None else []
    return found


def distilled(
    cfg: TeacherConfig, loss: Loss, rollout: Rollout, targets: losses.PolicyTargets, states: list[TeacherStates]
) -> Loss:
    """The loss of an update with the divergences to its teachers. rollout: of the mini-batch."""
    distillation = Distillation(states, Divergence(cfg.divergence, cfg.mix), cfg.coef * targets.weights)
    return losses.distilled(loss, distillation, dict(_means(rollout, targets.mean_weights)))


def with_sampled_divergence(run: RLRun, cfg: TeacherConfig, exp: Experience) -> tuple[Experience, dict[str, float]]:
    """The experience whose advantages count the teachers' log-probs of the sampled tokens, and metrics. The student's
    log-probs are those of the engine, which has drawn the tokens. Collective."""
    rollout, log_probs = exp.rollout, exp.rollout.rollout_log_probs.clone()
    for name, teacher in run.teachers.items():
        samples = _taught(cfg, name, rollout).nonzero().flatten()
        if samples.numel():
            with run.memory.during(name):
                made, _ = teacher.log_probs(rollout.pick(samples), run.cfg.rollout.sampling.temperature)
            log_probs[RESPONSE_TOKEN.places(rollout, samples)] = made
    ratios = log_probs - rollout.rollout_log_probs
    advantages = cfg.policy_coef * exp.advantages + cfg.coef * ratios
    means = _means(rollout, token_weights(rollout, "token-mean"))
    return replace(exp, advantages=advantages), {name: -float((some * ratios).sum()) for name, some in means}


def _taught(cfg: TeacherConfig, name: str, rollout: Rollout) -> Tensor:
    """Which samples [B] bool the teacher of section `name` teaches."""
    assert rollout.sources is not None
    if not cfg.teachers:
        return torch.ones(rollout.num_samples, dtype=torch.bool)
    return torch.tensor([f"{SOURCES}.{source}" == name for source in rollout.source_names])[rollout.sources]


def _means(rollout: Rollout, weights: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Weights [R] that sum token values to their mean over all tokens, and over those of each data source that has
    any. weights: of the mean over all."""
    yield "distill/kl", weights
    assert rollout.sources is not None
    of_token = rollout.sources.repeat_interleave(rollout.response_lens)
    for number, source in enumerate(rollout.source_names):
        own = torch.where(of_token == number, weights, 0)
        if source and float(own.sum()):
            yield f"distill/{source}", own / own.sum()
