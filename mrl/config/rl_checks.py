"""Settings of an RL run that contradict each other, or that would have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from pydantic import BaseModel

from mrl.config.derived import Machine, needs_ref, samples_per_minibatch, samples_per_step
from mrl.config.layout_checks import Archs, dp_sizes
from mrl.config.problems import Problem
from mrl.config.schema import RefConfig, RLConfig, ValidationConfig
from mrl.models.arch import ModelArch


def check(cfg: RLConfig, archs: Archs, machine: Machine) -> Iterator[Problem]:
    yield from _batch(cfg, machine)
    yield from _critic(cfg)
    yield from _kl(cfg)
    yield from _lengths(cfg, archs.actor)
    yield from _engine(cfg, archs.actor, machine)
    yield from _sync(cfg, machine)
    if cfg.data.validation is None and cfg.validation != ValidationConfig():
        yield Problem(("validation", "data.validation"), "has no effect: there is no validation file")


def changed(section: BaseModel, *names: str) -> list[str]:
    """Which of these keys differ from their defaults. A default that is written out is not a contradiction."""
    fields, values = type(section).model_fields, dict(section)
    return [name for name in names if values[name] != fields[name].default]


def inert(section: BaseModel, key: str, names: Sequence[str], because: str, other: str) -> Iterator[Problem]:
    for name in changed(section, *names):
        yield Problem((f"{key}.{name}", other), f"has no effect: {because}")


def _batch(cfg: RLConfig, machine: Machine) -> Iterator[Problem]:
    total, minibatch = samples_per_step(cfg), samples_per_minibatch(cfg)
    product = f"{cfg.batch.prompts_per_step} prompts x {cfg.batch.samples_per_prompt} samples = {total}"
    if total % minibatch:
        yield Problem(
            ("batch.samples_per_minibatch", "batch.prompts_per_step", "batch.samples_per_prompt"),
            f"{minibatch} does not divide the {product} samples of a step",
        )
    for key, dp in dp_sizes(cfg, machine).items():
        if minibatch < dp:
            explicit = cfg.batch.samples_per_minibatch is not None
            yield Problem(
                ("batch.samples_per_minibatch" if explicit else "batch.prompts_per_step", key),
                f"{minibatch} samples an update are fewer than the {dp} data-parallel replicas that share them",
            )


def _critic(cfg: RLConfig) -> Iterator[Problem]:
    if cfg.critic is None:
        return
    if cfg.critic.frozen:
        names = ["warmup_steps", "optimizer", "recompute"]
        yield from inert(cfg.critic, "critic", names, "the critic is frozen", "critic.frozen")
        yield from inert(cfg.algorithm, "algorithm", ["value_loss"], "the critic is frozen", "critic.frozen")
    elif cfg.critic.warmup_steps >= cfg.run.steps:
        message = f"{cfg.critic.warmup_steps} critic-only steps of {cfg.run.steps}: the actor would never be trained"
        yield Problem(("critic.warmup_steps", "run.steps"), message)


def _kl(cfg: RLConfig) -> Iterator[Problem]:
    kl, key = cfg.algorithm.kl, "algorithm.kl"
    on = f"{key}.use_in_reward" if kl.use_in_reward else f"{key}.use_in_loss"
    if not needs_ref(cfg):
        names = ["coef", "penalty", "controller", "target", "horizon_samples"]
        yield from inert(kl, key, names, "use_in_reward and use_in_loss are both false", f"{key}.use_in_reward")
        yield from inert(cfg.ref, "ref", list(RefConfig.model_fields), "no KL term uses a reference model", on)
        return
    if kl.use_in_reward and kl.use_in_loss:
        yield Problem((f"{key}.use_in_reward", f"{key}.use_in_loss"), "the same penalty would count twice: choose one")
    if kl.use_in_reward and kl.penalty.endswith("+"):
        message = f"{kl.penalty} differs from {kl.penalty[:-1]} in its gradient, and a reward has none"
        yield Problem((f"{key}.penalty", f"{key}.use_in_reward"), message)
    if kl.coef == 0:
        yield Problem((f"{key}.coef", on), "0 switches off the KL term that is switched on: set a coefficient")
    if kl.controller == "fixed":
        names = ["target", "horizon_samples"]
        yield from inert(kl, key, names, "the controller is fixed", f"{key}.controller")
        return
    for name in ("target", "horizon_samples"):
        if not changed(kl, name):
            yield Problem((f"{key}.{name}", f"{key}.controller"), "required by the adaptive controller")
    if kl.use_in_loss:
        message = "adaptive steers the penalty in the reward: use_in_loss takes a fixed coefficient"
        yield Problem((f"{key}.controller", f"{key}.use_in_loss"), message)


def _lengths(cfg: RLConfig, arch: ModelArch | None) -> Iterator[Problem]:
    context = cfg.rollout.max_context_tokens
    if arch is not None and context is not None and context > arch.max_positions:
        message = f"{context} is more than the model's {arch.max_positions} positions"
        yield Problem(("rollout.max_context_tokens", "model.path"), message)
    limit = context or (arch.max_positions if arch is not None else None)
    prompt, new = cfg.data.max_prompt_tokens, cfg.rollout.sampling.max_new_tokens
    if limit is not None and prompt + new > limit:
        yield Problem(
            (
                "data.max_prompt_tokens",
                "rollout.sampling.max_new_tokens",
                "rollout.max_context_tokens" if context else "model.path",
            ),
            f"{prompt} prompt tokens + {new} new tokens do not fit into a context of {limit}",
        )


def _engine(cfg: RLConfig, arch: ModelArch | None, machine: Machine) -> Iterator[Problem]:
    rollout = cfg.rollout
    if rollout.sampling.top_k != -1 and rollout.sampling.top_k < 1:
        yield Problem(("rollout.sampling.top_k",), f"must be -1 (off) or at least 1, got {rollout.sampling.top_k}")
    if rollout.urls:
        names = ["servers", "tensor", "memory_fraction", "startup_timeout_s", "max_context_tokens"]
        names += ["max_running_requests", "max_restarts", "server_args"]
        yield from inert(rollout, "rollout", names, "mrl starts no engine when urls are given", "rollout.urls")
        yield from _urls(rollout.urls)
        return
    if rollout.engine == "transformers":
        names = ["tensor", "memory_fraction", "server_args"]
        yield from inert(rollout, "rollout", names, "it is SGLang's, the engine is transformers", "rollout.engine")
    elif arch is not None and not _fits(rollout.tensor, arch):
        heads = f"{arch.num_heads} heads and {arch.num_kv_heads} key-value heads"
        message = f"{rollout.tensor} does not divide the model's {heads}"
        yield Problem(("rollout.tensor", "model.path"), message)
    engines = rollout.servers * rollout.tensor
    if machine.gpus and engines > machine.gpus:
        message = (
            f"{rollout.servers} servers x tensor {rollout.tensor} = {engines} GPUs, this machine has {machine.gpus}"
        )
        yield Problem(("rollout.servers", "rollout.tensor"), message)


def _fits(tensor: int, arch: ModelArch) -> bool:
    """The engine cuts heads evenly and copies key-value heads where there are fewer than ranks."""
    cut, copied = arch.num_kv_heads % tensor == 0, tensor % arch.num_kv_heads == 0
    return arch.num_heads % tensor == 0 and (cut or copied)


def _urls(urls: tuple[str, ...]) -> Iterator[Problem]:
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield Problem(("rollout.urls",), f"{url!r} is not an address such as http://host:30000")
    if len(set(urls)) < len(urls):
        yield Problem(("rollout.urls",), "the same engine is named twice")


def _sync(cfg: RLConfig, machine: Machine) -> Iterator[Problem]:
    transport = cfg.sync.transport
    if transport == "cuda_ipc" and machine.gpus == 0:
        yield Problem(("sync.transport",), "cuda_ipc needs GPUs, this machine has none: use shared_memory, or auto")
    remote = [url for url in cfg.rollout.urls if not _is_local(url)]
    if transport in ("cuda_ipc", "shared_memory") and remote:
        message = (
            f"{transport} cannot reach {', '.join(remote)} on another machine: use distributed, http, disk or auto"
        )
        yield Problem(("sync.transport", "rollout.urls"), message)
    if transport == "disk":
        yield from inert(cfg.sync, "sync", ["bucket_mib"], "disk transport writes files, not buckets", "sync.transport")


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
