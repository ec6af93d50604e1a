"""Checks of on-policy distillation."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.checks.base import Archs, without_effect
from mrl.config.checks.rollout import check_key_file, check_passwords
from mrl.config.problems import Problem
from mrl.config.sections.models import ParallelConfig
from mrl.config.sections.teacher import SOURCES, TeacherModelConfig
from mrl.config.trainers.rl import RLConfig

AXES = ("tensor", "pipeline", "context", "virtual_pipeline")


def check_files(cfg: RLConfig) -> Iterator[Problem]:
    """Checks the key files of the engines that serve teachers."""
    for name, model in cfg.teachers().items():
        yield from check_key_file(f"{name}.api_key_file", [model.url] if model.url else [], model.api_key_file)


def check(cfg: RLConfig, archs: Archs) -> Iterator[Problem]:
    """Yields contradictions, settings without effect, and combinations that are not supported."""
    teacher, key = cfg.teacher, "teacher.divergence"
    if teacher is None:
        return
    if teacher.path is None and not teacher.teachers:
        yield Problem(("teacher.path", SOURCES), "required: set the path of a teacher, or one for each data source")
    elif teacher.path is not None and teacher.teachers:
        yield Problem((SOURCES, "teacher.path"), "has no effect: path is the teacher of all data sources: choose one")
    if teacher.teachers:
        because = "each of the teachers has its own"
        yield from without_effect(teacher, "teacher", ["parallel", "offload", "url", "api_key_file"], because, SOURCES)
    if teacher.policy_coef == 0:
        leaves = "the policy loss counts 0 times"
        yield from without_effect(cfg.algorithm.kl, "algorithm.kl", ["use_in_reward"], leaves, "teacher.policy_coef")
        if cfg.critic is not None:
            yield Problem(("critic", "teacher.policy_coef"), f"has no effect on the actor: {leaves}: leave it out")
    because = f"the divergence is {teacher.divergence}"
    if teacher.divergence != "jsd":
        yield from without_effect(teacher, "teacher", ["beta"], because, key)
    if not teacher.divergence.startswith("skewed"):
        yield from without_effect(teacher, "teacher", ["skew"], because, key)
    if all(model.url is None for model in teacher.models.values()):
        names, because = ["top_k", "concurrent_requests", "timeout_s"], "the trainer computes every teacher"
        yield from without_effect(teacher, "teacher", names, because, "teacher.url")
    elif teacher.divergence == "sampled":
        yield from without_effect(teacher, "teacher", ["top_k"], because, key)
    for name, model in teacher.models.items():
        if model.url is not None:
            yield from _served(name, model, model.url, cfg.rollout.sampling.temperature)
            continue
        yield from without_effect(model, name, ["api_key_file"], "the trainer computes this teacher", f"{name}.url")
        if model.parallel is not None and teacher.divergence != "sampled":
            yield from _layout(f"{name}.parallel", model.parallel, cfg.actor.parallel)
    yield from _unsupported(cfg, archs)


def _served(name: str, model: TeacherModelConfig, url: str, temperature: float) -> Iterator[Problem]:
    """Checks a teacher that an engine serves."""
    key, key_file = f"{name}.url", f"{name}.api_key_file"
    yield from without_effect(model, name, ["parallel", "offload"], f"the engine at {url} computes this teacher", key)
    yield from check_passwords(key, key_file, (url,))
    if temperature != 1:
        what = f"{temperature:g}: an engine reports the log-probs of a prompt at temperature 1 only"
        message = f"{what}. Use 1.0, or leave {key} out, so that the trainer computes the teacher"
        yield Problem(("rollout.sampling.temperature", key), message)


def _layout(key: str, own: ParallelConfig, actor: ParallelConfig) -> Iterator[Problem]:
    for axis in AXES:
        mine, theirs = dict(own)[axis], dict(actor)[axis]
        if mine != theirs:
            message = (
                f"{mine} differs from the actor's {theirs}: the teacher's hidden states stay on the ranks that train "
                "on them. Use the same, or divergence: sampled, whose teacher may have any layout"
            )
            yield Problem((f"{key}.{axis}", f"actor.parallel.{axis}"), message)


def _unsupported(cfg: RLConfig, archs: Archs) -> Iterator[Problem]:
    actor, critic, why = archs.get("actor"), cfg.critic, "not supported together with a teacher"
    others = {
        "model.path": (actor is not None and actor.vision is not None, "vision models cannot be distilled"),
        "critic.warmup_steps": (critic is not None and critic.warmup_steps > 0, "the actor must learn in every step"),
        "rollout.early_passes": (cfg.rollout.early_passes is not None, "a teacher needs all samples of a step at once"),
        "replay": (cfg.replay is not None, "replayed samples are not those of the present policy"),
        "actor.routing_replay": (cfg.actor.routing_replay != "off", why),
        "actor.precision.fp8.recipe": (cfg.actor.precision.fp8.recipe != "none", why),
    }
    for key, (is_set, why) in others.items():
        if is_set:
            yield Problem((key, "teacher"), f"{why}: leave it or the teacher out")
