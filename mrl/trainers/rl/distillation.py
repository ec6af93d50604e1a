"""On-policy distillation: what the teachers say of a step's samples, and the actor's loss with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mrl.config.schema import TeacherConfig
from mrl.config.sections.teacher import SOURCES
from mrl.core import Rollout
from mrl.kernels.linear_divergence import Divergence
from mrl.learner import Loss, losses
from mrl.learner.loss_terms import Distillation, TeacherStates, TeacherTokens
from mrl.trainers.rl.experience import Experience, token_weights
from mrl.trainers.rl.run import RLRun
from mrl.trainers.rl.teacher_engines import ServedTokens, ask
from mrl.units import RESPONSE_TOKEN

Teachers = list[TeacherStates | TeacherTokens]
States = Mapping[tuple[int, ...], Teachers]  # by the samples of an update


def states_of_teachers(run: RLRun, exp: Experience) -> States | None:
    """Returns each teacher's outputs on its samples in every update of the step; None without teachers, or if they are
    part of the advantages already. Collective."""
    cfg = run.cfg.teacher
    if cfg is None or cfg.divergence == "sampled":
        return None
    epochs = range(run.cfg.batch.epochs_per_step)
    return states_in(run, cfg, exp.rollout, (each for n in epochs for each in run.minibatches(exp.rollout, n)))


def states_in(run: RLRun, cfg: TeacherConfig, rollout: Rollout, updates: Iterable[Sequence[int]]) -> States:
    """Returns each teacher's outputs on its samples in updates of the rollout: hidden states of the computed teachers,
    and top tokens of those on engines. Collective."""
    found: dict[tuple[int, ...], Teachers] = {tuple(sample_ids): [] for sample_ids in updates}
    for name, teacher in run.teachers.items():
        run.memory.begin(name)
        weight = teacher.head_for(run.actor)
        vocab_size = min(teacher.arch.vocab_size, run.actor.arch.vocab_size)
        for sample_ids, states in found.items():
            part = rollout.pick(torch.tensor(sample_ids))
            own = _taught(cfg, name, part)
            whole, every = not teacher.planner.shares, range(part.num_samples)
            packed = run.actor.planner.micro_batches(part, every, only=own, whole=whole)
            samples = own.nonzero().flatten().tolist()
            made = teacher.hidden_states(part, samples, packed)
            states += [TeacherStates(made, weight, vocab_size)] if weight is not None else []
    if (served := _served_tokens(run, cfg, rollout, cfg.top_k)) is not None:
        for sample_ids, states in found.items():
            states.append(served.part(rollout, torch.tensor(sample_ids), run.actor.arch.vocab_size))
    return found


def _served_tokens(run: RLRun, cfg: TeacherConfig, rollout: Rollout, top_k: int) -> ServedTokens | None:
    """Returns the outputs of teachers on engines for a step's tokens, on every rank; None without any. Collective."""
    served = [name for name, model in cfg.models.items() if model.url is not None]
    if not served:
        return None
    samples = {name: _taught(cfg, name, rollout).nonzero().flatten() for name in served}
    return run.world.from_main(
        "asking the teachers' engines",
        lambda: ask(run.teacher_engines, samples, rollout, top_k, run.world.activity.note),
    )


def distilled(
    cfg: TeacherConfig, loss: Loss, rollout: Rollout, targets: losses.PolicyTargets, states: Teachers
) -> Loss:
    """The loss of an update with the divergences to its teachers. rollout: of the mini-batch."""
    distillation = Distillation(states, Divergence(cfg.divergence, cfg.mix), cfg.coef * targets.weights)
    return losses.distilled(loss, distillation, dict(_means(rollout, targets.mean_weights)))


def with_sampled_divergence(run: RLRun, cfg: TeacherConfig, exp: Experience) -> tuple[Experience, dict[str, float]]:
    """The experience whose advantages count the teachers' log-probs of the sampled tokens, and metrics. The student's
    log-probs are those of the engine, which has drawn the tokens. Collective."""
    rollout = exp.rollout
    ratios = log_probs_of_teachers(run, cfg, rollout) - rollout.rollout_log_probs
    advantages = cfg.policy_coef * exp.advantages + cfg.coef * ratios
    means = _means(rollout, token_weights(rollout, "token-mean"))
    return replace(exp, advantages=advantages), {name: -float((some * ratios).sum()) for name, some in means}


def log_probs_of_teachers(run: RLRun, cfg: TeacherConfig, rollout: Rollout) -> Tensor:
    """The log-probs [R] that each sample's teacher gives its response tokens. Collective."""
    log_probs = torch.zeros(rollout.num_response_tokens)
    for name, teacher in run.teachers.items():
        samples = _taught(cfg, name, rollout).nonzero().flatten()
        if samples.numel():
            with run.memory.during(name):
                made, _ = teacher.log_probs(rollout.pick(samples), run.cfg.rollout.sampling.temperature)
            log_probs[RESPONSE_TOKEN.places(rollout, samples)] = made
    served = _served_tokens(run, cfg, rollout, top_k=0)
    return log_probs if served is None else torch.where(served.taught, served.log_probs, log_probs)


def _taught(cfg: TeacherConfig, name: str, rollout: Rollout) -> Tensor:
    """Which samples [B] bool the teacher of section `name` teaches."""
    if not cfg.teachers:
        return torch.ones(rollout.num_samples, dtype=torch.bool)
    assert rollout.sources is not None
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
