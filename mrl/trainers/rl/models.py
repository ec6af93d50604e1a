"""The models of an RL run, and other weights that are kept of its policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mrl.checkpoint import Checkpointable
from mrl.config.schema import EMAConfig, RLConfig
from mrl.config.trainers.rl import needs_ref
from mrl.data import load_image_processor
from mrl.data.image_store import ImageStore
from mrl.families import is_reward_model, load_arch, read_hf_config
from mrl.learner import Learner
from mrl.learner.policy_copy import PolicyCopy
from mrl.trainers.shared.memory import offload_new_model
from mrl.trainers.shared.models import build_learner
from mrl.trainers.shared.references import ActorWithoutAdapters, RefreshedReference
from mrl.trainers.shared.world import World


class MovingAverage(PolicyCopy):
    """Moving average of the actor's weights, updated after every update."""

    def __init__(self, actor: Learner, cfg: EMAConfig) -> None:
        super().__init__(actor, offload=cfg.offload)
        self._share = 1 - cfg.decay

    def after_update(self) -> None:
        self.follow(self._share)


@dataclass(frozen=True)
class Models:
    """Models of one run, on every rank."""

    actor: Learner
    critic: Learner | None
    ref: Learner | PolicyCopy | ActorWithoutAdapters | None
    reward: Learner | None
    ema: MovingAverage | None
    teachers: Mapping[str, Learner] = field(default_factory=dict)  # by the sections of their keys

    @property
    def learners(self) -> dict[str, Learner]:
        """Learners by their names in the table of memory order."""
        found = {"actor": self.actor, "critic": self.critic, "ref": self.ref, "reward": self.reward}
        return {name: each for name, each in found.items() if isinstance(each, Learner)} | dict(self.teachers)

    @property
    def saved(self) -> dict[str, Checkpointable]:
        """Learners that a checkpoint holds, by name."""
        parts: dict[str, Checkpointable] = {"actor": self.actor}
        if self.critic is not None and self.critic.trainable:
            parts["critic"] = self.critic
        if self.ema is not None:
            parts["ema"] = self.ema
        if isinstance(self.ref, RefreshedReference):
            parts["ref"] = self.ref
        return parts


def build_models(cfg: RLConfig, world: World) -> Models:
    """Actor; critic if there is one; reference if a KL term asks for it. Each is put away before the next is built."""
    actor = build_learner(cfg, world, "policy", None, cfg.actor, replays=cfg.actor.routing_replay != "off")
    offload_new_model("actor", actor)
    critic = None
    if cfg.critic is not None:
        critic = build_learner(cfg, world, "critic", cfg.critic.path, cfg.critic, trainable=not cfg.critic.frozen)
        offload_new_model("critic", critic)
    ema = MovingAverage(actor, cfg.ema) if cfg.ema is not None else None
    ref = _reference(cfg, world, actor, ema) if needs_ref(cfg) else None
    teachers = {}
    for name, model in cfg.computed_teachers().items():
        train = cfg.like_actor(model)
        teachers[name] = build_learner(cfg, world, "policy", model.path, train, trainable=False)
        offload_new_model(name, teachers[name])
    models = Models(actor, critic, ref, _reward_model(cfg, world), ema, teachers)
    if (image_processor := load_image_processor(cfg.model.path, cfg.data)) is not None:
        store = ImageStore((*cfg.data.train, *(cfg.data.validation or ())), image_processor)
        for learner in models.learners.values():
            learner.pixels = store
    return models


def notes(cfg: RLConfig) -> list[str]:
    """Yields where the critic's weights come from, if there is one, and remarks on the reward model."""
    found = []
    if (judge := cfg.reward.model) is not None and read_hf_config(judge.path).get("pad_token_id") in _ends(judge.path):
        found.append(
            f"reward model: {judge.path} pads with EOS. transformers then takes the score of the token before EOS, and "
            "may have trained it so; mrl takes that of the last one"
        )
    if judge is not None and load_arch(cfg.model.path).vision and not load_arch(judge.path).vision:
        found.append(f"reward model: {judge.path} sees no pictures; it is told one image token for each")
    if cfg.critic is None:
        return found
    path = cfg.critic.path or cfg.model.path
    if cfg.critic.path is None and cfg.model.from_scratch:
        return [*found, "critic: random weights, its values start at 0"]
    head = "with its score head" if is_reward_model(path) else "its values start at 0"
    return [*found, f"critic: starts from {path}, {head}"]


def _ends(path: str) -> tuple[int, ...]:
    return load_arch(path).eos_token_ids


def _reference(
    cfg: RLConfig, world: World, actor: Learner, ema: MovingAverage | None
) -> Learner | MovingAverage | RefreshedReference | ActorWithoutAdapters | None:
    if cfg.ref.policy == "ema":
        return ema
    if cfg.ref.policy == "refreshed":
        assert cfg.ref.refresh_every_steps is not None
        return RefreshedReference(actor, cfg.ref.refresh_every_steps, cfg.ref.refresh_share)
    if cfg.ref_is_actor:
        return ActorWithoutAdapters(actor)
    reference = build_learner(cfg, world, "policy", cfg.ref.path, cfg.like_actor(cfg.ref), trainable=False)
    offload_new_model("ref", reference)
    return reference


def _reward_model(cfg: RLConfig, world: World) -> Learner | None:
    model = cfg.reward.model
    if model is None:
        return None
    judge = build_learner(cfg, world, "critic", model.path, cfg.like_actor(model), trainable=False)
    offload_new_model("reward", judge)
    return judge
