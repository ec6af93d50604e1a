"""Configuration of `trainer: rl`, and the numbers that follow from its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mrl.config.file_fingerprint import file_of
from mrl.config.sections.adapter import AdapterConfig
from mrl.config.sections.agent import AgentConfig
from mrl.config.sections.algorithm import Algorithm, AlgorithmConfig
from mrl.config.sections.data import BatchConfig
from mrl.config.sections.models import ActorConfig, CriticConfig, RefConfig, TrainConfig
from mrl.config.sections.placement import PlacementConfig
from mrl.config.sections.policy import RolloutCorrectionConfig
from mrl.config.sections.reuse import EMAConfig, PTXConfig, ReplayConfig
from mrl.config.sections.reward import RewardConfig, RewardModelConfig, ServerConfig
from mrl.config.sections.rollout import RolloutConfig, SyncConfig, ValidationConfig
from mrl.config.sections.teacher import TeacherConfig, TeacherModelConfig
from mrl.config.trainers.base import AnyConfig, Config, DataUse, ModelSpec, ModelUse, StepSize, renamed
from mrl.config.verifiers_environments import is_environment, module_file
from mrl.options.estimators import CustomEstimator
from mrl.options.losses import CustomLoss


class RLConfig(Config):
    """`trainer: rl`: PPO, GRPO and related algorithms."""

    trainer: Literal["rl"]  # PPO, GRPO and related algorithms
    actor: ActorConfig = ActorConfig()  # the trained model: its layout and optimizer
    critic: CriticConfig | None = None
    ref: RefConfig = RefConfig()
    teacher: TeacherConfig | None = None
    ema: EMAConfig | None = None
    batch: BatchConfig
    rollout: RolloutConfig = RolloutConfig()
    sync: SyncConfig = SyncConfig()
    placement: PlacementConfig = PlacementConfig()
    agent: AgentConfig | None = None
    reward: RewardConfig
    algorithm: Algorithm
    replay: ReplayConfig | None = None
    ptx: PTXConfig | None = None
    validation: ValidationConfig = ValidationConfig()
    adapters: dict[str, AdapterConfig] = {}  # name -> adapter, to train several of one base; empty: one

    def adapter_configs(self) -> dict[str, RLConfig]:
        found = {}
        for name, own in self.adapters.items():
            given = {key: value for key, value in dict(own).items() if value is not None}
            lora, optimizer = given.pop("lora", self.actor.lora), given.pop("optimizer", self.actor.optimizer)
            given["actor"] = self.actor.model_copy(update={"lora": lora, "optimizer": optimizer})
            sampling = given.pop("sampling", self.rollout.sampling)
            given["rollout"] = self.rollout.model_copy(update={"sampling": sampling})
            if own.data is not None and own.data.validation is None and own.validation is None:
                given["validation"] = ValidationConfig()  # the run's is for other adapters
            found[name] = self.model_copy(update={**given, "adapters": {}})
        return found

    @property
    def policies(self) -> list[RLConfig]:
        """The configurations of all adapters; of a run with one policy its own."""
        return [*self.adapter_configs().values()] or [self]

    def parts(self) -> Iterator[tuple[AnyConfig, dict[str, str]]]:
        for name, cfg in self.adapter_configs().items():
            given = [key for key, value in dict(self.adapters[name]).items() if value is not None]
            moved = {key: f"adapters.{name}.{key}" for key in given}
            for own, key in (("sampling", "rollout"), ("optimizer", "actor"), ("lora", "actor")):
                if own in moved:
                    moved[f"{key}.{own}"] = moved.pop(own)
            yield cfg, moved

    @property
    def sees_pictures(self) -> bool:
        return True

    @property
    def has_turns(self) -> bool:
        return self.agent is not None

    def models(self) -> dict[str, ModelUse]:
        found = super().models()
        if (critic := self.critic) is not None:
            found["critic"] = ModelUse(critic.path, critic.parallel, critic, has_head=True)
        has_own = needs_ref(self) and not self.ref_is_actor
        found["ref"] = ModelUse(self.ref.path, self.ref.parallel if has_own else None)
        if (judge := self.reward.model) is not None:
            found["reward.model"] = ModelUse(judge.path, judge.parallel or self.actor.parallel, scores=True)
        for name, teacher in self.teachers().items():
            layout = (teacher.parallel or self.actor.parallel) if teacher.url is None else None
            found[name] = ModelUse(teacher.path, layout, is_teacher=True, is_served=teacher.url is not None)
        return found

    def built(self) -> dict[str, ModelSpec]:
        found = super().built()
        if (critic := self.critic) is not None:
            found["critic"] = ModelSpec(critic.path, critic, scores=True, is_trained=not critic.frozen)
        if needs_ref(self) and self.ref.policy == "frozen" and not self.ref_is_actor:
            found["ref"] = ModelSpec(self.ref.path, self.like_actor(self.ref))
        if (judge := self.reward.model) is not None:
            found["reward"] = ModelSpec(judge.path, self.like_actor(judge), scores=True)
        for name, teacher in self.computed_teachers().items():
            found[name] = ModelSpec(teacher.path, self.like_actor(teacher))
        return found

    def teachers(self) -> dict[str, TeacherModelConfig]:
        """Returns the teachers by the section of each one's keys; none without distillation."""
        return self.teacher.models if self.teacher is not None else {}

    def computed_teachers(self) -> dict[str, TeacherModelConfig]:
        """Returns those of `teachers` that the trainer computes itself."""
        return {name: teacher for name, teacher in self.teachers().items() if teacher.url is None}

    @property
    def ref_is_actor(self) -> bool:
        """True if the reference, if there is one, is the actor without its adapters."""
        return self.actor.lora is not None and self.ref.policy == "frozen" and self.ref.path is None

    def like_actor(self, own: RefConfig | RewardModelConfig | TeacherModelConfig) -> TrainConfig:
        """Returns the actor's settings, overridden by those that `own` sets."""
        names = ("parallel", "max_tokens_per_microbatch", "precision", "offload")
        given = {name: dict(own).get(name) for name in names}
        return self.actor.model_copy(update={name: value for name, value in given.items() if value is not None})

    def copies(self) -> dict[str, bool]:
        found = {"moving average": self.ema.offload} if self.ema is not None else {}
        return found | ({"reference": True} if needs_ref(self) and self.ref.policy == "refreshed" else {})

    def engines(self) -> tuple[RolloutConfig, SyncConfig]:
        context = self.rollout.max_context_tokens or max(most_tokens(cfg) for cfg in self.policies)
        return self.rollout.model_copy(update={"max_context_tokens": context}), self.sync

    def nodes_per_engine(self) -> int:
        return self.placement.nodes_per_engine

    def engine_nodes(self) -> PlacementConfig | None:
        return self.placement if self.placement.is_apart else None

    def step_size(self) -> StepSize:
        single = updates_per_step(self) == 1 and self.replay is None
        needed = {"actor": needs_forward_pass(self.algorithm, single), "ref": needs_ref(self), "critic": self.critic}
        needed |= dict.fromkeys(self.computed_teachers(), True)
        return StepSize(
            learnt=samples_per_step(self) + reused_samples_per_step(self),
            minibatch=self.batch.samples_per_minibatch or samples_per_step(self) + reused_samples_per_step(self),
            group=1 if self.batch.shuffle_minibatches or self.replay else self.batch.samples_per_prompt,
            epochs=self.batch.epochs_per_step,
            prompts=self.batch.prompts_per_step,
            sampled=samples_per_step(self),
            prompt_tokens=self.data.max_prompt_tokens,
            response_tokens=most_tokens(self) - self.data.max_prompt_tokens,
            passes=tuple(
                "actor" if name == "ref" and self.ref_is_actor else name for name, is_it in needed.items() if is_it
            ),
            image_tokens=min(self.data.max_prompt_tokens, self.data.max_images * self.data.max_image_tokens),
            replays=self.actor.routing_replay,
            taught=self._kept_states() if self.teacher is not None and self.teacher.divergence != "sampled" else 0,
            served_tokens=self.teacher.top_k if self.teacher is not None and self.teacher_urls() else 0,
        )

    def _kept_states(self) -> int:
        """Returns the number of epochs with mini-batches of their own, for each of which teachers compute."""
        return self.batch.epochs_per_step if self.batch.shuffle_minibatches else 1

    def min_updates(self, name: str) -> int:
        waits = self.critic.warmup_steps if self.critic is not None and name == "actor" else 0
        return (self.run.steps - waits) * updates_per_step(self)

    def data_uses(self) -> dict[str, DataUse]:
        sources = self.teacher.teachers if self.teacher is not None else ()
        found = {"data": DataUse(self.data, prompts_per_round(self), is_sampled=True, sources=sources)}
        if self.ptx is not None:
            found["ptx.data"] = DataUse(self.ptx.data, most_updates_per_step(self) * self.ptx.samples_per_update)
        for name, own in self.adapter_configs().items():
            if self.adapters[name].data is not None:
                found[f"adapters.{name}.data"] = own.data_uses()["data"]
        return found

    def reread_files(self) -> Iterator[tuple[str, str]]:
        yield from super().reread_files()
        algorithm, agent, reward = self.algorithm, self.agent, self.reward
        called = [("reward.function", reward.function), *(("reward.functions", f) for f in reward.functions.values())]
        called += (("reward.recipe", name) for mix in reward.recipe.values() for name in mix)
        called.append(("algorithm.filter_groups.function", algorithm.filter_groups.function))
        if isinstance(algorithm.policy_loss, CustomLoss):
            called.append(("algorithm.policy_loss.function", algorithm.policy_loss.function))
        if isinstance(algorithm, CustomEstimator):
            called.append(("algorithm.advantage.function", algorithm.advantage.function))
        if agent is not None:
            called.append(("agent.parser", agent.parser))
            if is_environment(agent.rollout):
                yield "agent.rollout", module_file(agent.rollout)
            else:
                called.append(("agent.rollout", agent.rollout))
        yield from ((key, file) for key, spec in called if (file := file_of(spec)))
        for own, moved in self.parts():
            yield from ((renamed(key, moved), file) for key, file in own.reread_files() if renamed(key, moved) != key)

    def rewards(self) -> RewardConfig:
        return self.reward

    def reward_servers(self) -> dict[str, ServerConfig]:
        found = super().reward_servers()
        for name, own in self.adapter_configs().items():
            if self.adapters[name].reward is not None:
                found |= {f"adapters.{name}.{key}": server for key, server in own.reward_servers().items()}
        return found

    def algorithm_used(self) -> AlgorithmConfig:
        return self.algorithm

    def given_urls(self) -> tuple[str, ...]:
        return self.rollout.urls

    def teacher_urls(self) -> dict[str, str]:
        return {f"{name}.url": teacher.url for name, teacher in self.teachers().items() if teacher.url is not None}

    def timed_parts(self) -> tuple[str, ...]:
        return ("rollout", "reward", "sync")

    def offloads_memory(self) -> bool:
        return True

    def summary(self) -> list[tuple[str, str]]:
        batch, new, reused = self.batch, samples_per_step(self), reused_samples_per_step(self)
        minibatch = batch.samples_per_minibatch or new + reused
        updates = f"{batch.epochs_per_step} x {(new + reused) // minibatch} mini-batches of {minibatch} samples"
        rows = [("step", f"{batch.prompts_per_step} prompts x {batch.samples_per_prompt} = {new} samples")]
        if (groups := self.algorithm.filter_groups).is_on:
            bound = f"at most {groups.max_num_gen_batches} rounds of {prompts_per_round(self)} prompts per step"
            rows.append(("dynamic sampling", bound))
        if self.replay is not None:
            kept = f"the buffer keeps at most {self.replay.buffer_prompts} prompts"
            rows.append(("replay", f"plus {reused} samples of earlier steps; {kept}"))
        rows.append(("updates", f"{most_updates_per_step(self)} per step: {updates}"))
        own = f"{self.rollout.servers} x tensor {self.rollout.tensor}"
        where = own if not self.rollout.urls else "at rollout.urls"
        if (placement := self.engine_nodes()) is not None:
            each = f"on each of {placement.nodes} nodes"
            if placement.nodes_per_engine > 1:
                each = f"on each group of {placement.nodes_per_engine} of {placement.nodes} nodes"
            where = f"{own} {each} (mrl serve)"
        elif (size := self.placement.nodes_per_engine) > 1:
            where = f"{own} on each group of {size} nodes"
        if self.adapters:
            steps = (f"{name} ({samples_per_step(cfg)} samples a step)" for name, cfg in self.adapter_configs().items())
            rows = [("adapters", ", ".join(steps))]
        return [*rows, ("engine", f"{self.rollout.engine}, {where}")]


def most_tokens(cfg: RLConfig) -> int:
    """Returns the maximum tokens of a sample: the prompt and everything after it."""
    one_turn = cfg.data.max_prompt_tokens + cfg.rollout.sampling.max_new_tokens
    return one_turn if cfg.agent is None else cfg.agent.max_tokens


def counts_turns(cfg: RLConfig) -> bool:
    """True if rewards of an agent's turns count at their own turn, because the score is their plain sum."""
    algorithm = cfg.algorithm
    as_given = not algorithm.use_score_scaling and algorithm.score_clip is None
    return cfg.agent is not None and algorithm.takes_turns and cfg.reward.function == "environment" and as_given


def needs_ref(cfg: RLConfig) -> bool:
    return cfg.algorithm.kl.use_in_reward or cfg.algorithm.kl.use_in_loss


def needs_forward_pass(cfg: AlgorithmConfig, single_update: bool) -> bool:
    """True if the trainer must compute log-probs and entropies before the first update.

    Args:
        single_update: the step makes one update only
    """
    old_ones = cfg.old_log_probs == "trainer" and not single_update
    corrects = cfg.rollout_correction != RolloutCorrectionConfig()
    chooses = cfg.policy_loss.high_entropy_token_ratio < 1
    return cfg.needs_distribution or old_ones or corrects or cfg.kl.use_in_reward or chooses


def samples_per_step(cfg: RLConfig) -> int:
    return cfg.batch.prompts_per_step * cfg.batch.samples_per_prompt


def prompts_per_round(cfg: RLConfig) -> int:
    """Returns the number of prompts whose responses are generated at once."""
    return cfg.algorithm.filter_groups.prompts_per_round or cfg.batch.prompts_per_step


def most_samples_per_step(cfg: RLConfig) -> int:
    """Returns the maximum responses of a step: all rounds of dynamic sampling, and the greedy responses."""
    groups = cfg.algorithm.filter_groups
    drawn = prompts_per_round(cfg) * groups.max_num_gen_batches if groups.is_on else cfg.batch.prompts_per_step
    greedy = cfg.batch.prompts_per_step if cfg.algorithm.needs_greedy else 0
    return drawn * cfg.batch.samples_per_prompt + greedy


def samples_per_minibatch(cfg: RLConfig) -> int:
    return cfg.batch.samples_per_minibatch or samples_per_step(cfg)


def updates_per_step(cfg: RLConfig) -> int:
    return cfg.batch.epochs_per_step * (samples_per_step(cfg) // samples_per_minibatch(cfg))


def reused_samples_per_step(cfg: RLConfig) -> int:
    """Returns the replayed samples per step, once the replay buffer has enough."""
    return cfg.replay.prompts_per_step * cfg.batch.samples_per_prompt if cfg.replay is not None else 0


def most_updates_per_step(cfg: RLConfig) -> int:
    """Returns the updates of a step with replayed samples."""
    total = samples_per_step(cfg) + reused_samples_per_step(cfg)
    return cfg.batch.epochs_per_step * (total // (cfg.batch.samples_per_minibatch or total))
