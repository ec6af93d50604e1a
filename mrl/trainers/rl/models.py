"""The models of an RL run, and other weights that are kept of its policy."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.checkpoint import Part
from mrl.config.schema import EMAConfig, ParallelConfig, RefConfig, RLConfig, TrainConfig
from mrl.config.trainers.rl import needs_ref
from mrl.families import is_reward_model
from mrl.learner import Learner
from mrl.learner.policy_copy import PolicyCopy
from mrl.trainers.shared.models import build_learner
from mrl.trainers.shared.world import World


class MovingAverage(PolicyCopy):
    """Of the actor, after every update."""

    def __init__(self, actor: Learner, cfg: EMAConfig) -> None:
        super().__init__(actor, offload=cfg.offload)
        self._share = 1 - cfg.decay

    def after_update(self) -> None:
        self.follow(self._share)


class RefreshedReference(PolicyCopy):
    """The actor as it was some steps ago."""

    def __init__(self, actor: Learner, cfg: RefConfig) -> None:
        assert cfg.refresh_every_steps is not None
        super().__init__(actor, offload=True)
        self._every, self._share = cfg.refresh_every_steps, cfg.refresh_share

    def after_step(self, step: int) -> None:
        """step: how many are done"""
        if step % self._every == 0:
            self.follow(self._share)


@dataclass(frozen=True)
class Models:
    """Of one run, on every rank."""

    actor: Learner
    critic: Learner | None
    ref: Learner | PolicyCopy | None
    reward: Learner | None
    ema: MovingAverage | None

    @property
    def saved(self) -> dict[str, Part]:
        """What a checkpoint holds of them, by name."""
        parts: dict[str, Part] = {"actor": self.actor}
        if self.critic is not None and self.critic.trainable:
            parts["critic"] = self.critic
        if self.ema is not None:
            parts["ema"] = self.ema
        if isinstance(self.ref, RefreshedReference):
            parts["ref"] = self.ref
        return parts


def build_models(cfg: RLConfig, world: World) -> Models:
    """Actor; critic if there is one; reference if a KL term asks for it."""
    actor = build_learner(cfg, world, "policy", None, cfg.actor)
    critic = None
    if cfg.critic is not None:
        critic = build_learner(cfg, world, "critic", cfg.critic.path, cfg.critic, trainable=not cfg.critic.frozen)
    ema = MovingAverage(actor, cfg.ema) if cfg.ema is not None else None
    ref = _reference(cfg, world, actor, ema) if needs_ref(cfg) else None
    return Models(actor, critic, ref, _reward_model(cfg, world), ema)


def notes(cfg: RLConfig) -> list[str]:
    """Where the critic's weights come from, if there is one."""
    if cfg.critic is None:
        return []
    path = cfg.critic.path or cfg.model.path
    if cfg.critic.path is None and cfg.model.from_scratch:
        return ["critic: random weights, its values start at 0"]
    head = "with its score head" if is_reward_model(path) else "its values start at 0"
    return [f"critic: starts from {path}, {head}"]


def _reference(
    cfg: RLConfig, world: World, actor: Learner, ema: MovingAverage | None
) -> Learner | MovingAverage | RefreshedReference | None:
    if cfg.ref.policy == "ema":
        return ema
    if cfg.ref.policy == "refreshed":
        return RefreshedReference(actor, cfg.ref)
    layout = _like_actor(cfg, cfg.ref.parallel, cfg.ref.max_tokens_per_microbatch)
    return build_learner(cfg, world, "policy", cfg.ref.path, layout, trainable=False)


def _reward_model(cfg: RLConfig, world: World) -> Learner | None:
    model = cfg.reward.model
    if model is None:
        return None
    layout = _like_actor(cfg, model.parallel, model.max_tokens_per_microbatch)
    return build_learner(cfg, world, "critic", model.path, layout, trainable=False)


def _like_actor(cfg: RLConfig, parallel: ParallelConfig | None, max_tokens: int | None) -> TrainConfig:
    """The actor's settings, but for those that are given."""
    given = {"parallel": parallel, "max_tokens_per_microbatch": max_tokens}
    return cfg.actor.model_copy(update={name: value for name, value in given.items() if value is not None})
