"""Base classes of the trainers' configurations, and the questions that other packages ask them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from mrl.config.sections.algorithm import AlgorithmConfig
from mrl.config.sections.data import DataConfig, Form, HeldOutConfig, PreferenceDataConfig, SFTDataConfig, SourceConfig
from mrl.config.sections.lora import LoRAConfig
from mrl.config.sections.models import ModelConfig, ParallelConfig, TrainConfig
from mrl.config.sections.placement import PlacementConfig
from mrl.config.sections.reward import RewardConfig, ServerConfig
from mrl.config.sections.rollout import RolloutConfig, SyncConfig
from mrl.config.sections.run import CheckpointConfig, ResilienceConfig, RunConfig
from mrl.config.tokenizer_files import TOKENIZER_FILES
from mrl.families import has_draft_layers
from mrl.options.base import Section


@dataclass(frozen=True)
class ModelUse:
    """The use of a model by a run.

    Attributes:
        path: directory of the model; None: that of the run's model
        parallel: layout; None: the model has no layout of its own
        train: training settings; None: never trained
        scores: the model needs a score head
        has_head: the model has a score or value head, which may be newly initialized
        is_teacher: its tokenizer must be the actor's, but its vocabulary may have more or fewer unused ids
        is_served: an engine computes it, so its directory needs no weights
    """

    path: str | None = None
    parallel: ParallelConfig | None = None
    train: TrainConfig | None = None
    scores: bool = False
    has_head: bool = False
    is_teacher: bool = False
    is_served: bool = False


@dataclass(frozen=True)
class DataUse:
    """The use of a data section by a run.

    Attributes:
        rows_per_step: rows of `train` per step
        is_sampled: engines generate responses to the prompts; False: every row must have an answer to train on
        preferences: form of preference rows; None: rows with answers
        margins: every row has a margin
        cuts: long responses are truncated at the end
        is_evaluated: rows of `validation` are evaluated, without sampling
        sources: the only data sources that rows of `train` may have; empty: any
    """

    cfg: DataConfig
    rows_per_step: int
    is_sampled: bool = False
    preferences: Form | None = None
    margins: bool = False
    cuts: bool = True
    is_evaluated: bool = False
    sources: Container[str] = ()

    def needed(self, columns: Container[str]) -> dict[str, str]:
        """Returns setting -> column name for the columns that a row with `columns` must have."""
        if isinstance(self.cfg, PreferenceDataConfig) and self.preferences is not None:
            return self.cfg.needed(self.preferences, columns, self.margins)
        if isinstance(self.cfg, SFTDataConfig):
            return self.cfg.needed_keys()
        answer = {} if self.is_sampled else {"answer_key": self.cfg.answer_key}
        return {"prompt_key": self.cfg.prompt_key} | answer

    @property
    def reads_prompts(self) -> bool:
        """True if the prompt column of a row is used."""
        return self.preferences is not None or "prompt_key" in self.needed(())


def section_of(model: str) -> str:
    """Returns the section of a model that a run builds, by its name in `Config.built`."""
    return "reward.model" if model == "reward" else model


@dataclass(frozen=True)
class ModelSpec:
    """A model that a run builds.

    Attributes:
        path: directory of the model; None: that of the run's model
        train: layout, micro-batches, layers and offload
        scores: a value or score head replaces the output layer
        several: LoRA of each of several adapters that share the model; empty: `train.lora` is the only one
    """

    path: str | None
    train: TrainConfig
    scores: bool = False
    is_trained: bool = False
    several: tuple[LoRAConfig, ...] = ()

    @property
    def loras(self) -> tuple[LoRAConfig, ...]:
        """All LoRA adapters that are trained instead of the model's weights; empty: all weights or none are."""
        if not self.is_trained:
            return ()
        return self.several or ((self.train.lora,) if self.train.lora is not None else ())


@dataclass(frozen=True)
class StepSize:
    """Sizes of one step, in samples unless the name says tokens.

    Attributes:
        prompts: prompts of generated responses; 0: no responses are generated
        sampled: responses to these prompts, in a step without dropped groups
        learnt: samples that one epoch of updates trains on
        minibatch: samples of one update
        group: consecutive samples with the same prompt
        prompt_tokens: maximum tokens of a prompt; None: depends on the data, up to a micro-batch
        response_tokens: maximum tokens of a response; None as for prompt_tokens
        passes: names of the models that compute log-probs or values of all samples before the updates
        image_tokens: maximum image tokens of a prompt, with vision models
        replays: source of the actor's expert routing (actor.routing_replay)
        taught: how often the teachers' hidden states of a step's response tokens are kept; 0: the actor's loss has no
            divergence to teachers
        served_tokens: tokens that engines report for each response token as their teachers' most likely ones
    """

    learnt: int
    minibatch: int
    group: int = 1
    epochs: int = 1
    prompts: int = 0
    sampled: int = 0
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    passes: tuple[str, ...] = ()
    image_tokens: int = 0
    replays: Literal["off", "trainer", "engine"] = "off"
    taught: int = 0
    served_tokens: int = 0


def renamed(key: str, moved: Mapping[str, str]) -> str:
    """Returns the name of a key in the whole configuration. moved: sections of the part -> their names there"""
    section = next((own for own in moved if f"{key}.".startswith(f"{own}.")), "")
    return moved[section] + key.removeprefix(section) if section else key


class AnyConfig(Section):
    """The keys of every trainer. Other packages call these methods and never check which trainer it is."""

    trainer: str  # kind of training
    run: RunConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    resilience: ResilienceConfig = ResilienceConfig()

    @property
    def sees_pictures(self) -> bool:
        """True if rows may contain images that the models read."""
        return False

    @property
    def has_turns(self) -> bool:
        """True if samples are multi-turn trajectories."""
        return False

    def imitated(self) -> SFTDataConfig | None:
        """Returns the settings for rows with answers to imitate; None if there are no such rows."""
        return None

    def models(self) -> dict[str, ModelUse]:
        """Returns every language model of the run, by the section of its keys `path`, `parallel` and `optimizer`."""
        return {}

    def built(self) -> dict[str, ModelSpec]:
        """Returns every language model that the run builds, by name."""
        return {}

    def copies(self) -> dict[str, bool]:
        """Returns the float32 copies of the actor's weights, by name, with True for copies in host memory."""
        return {}

    def engines(self) -> tuple[RolloutConfig, SyncConfig] | None:
        """Returns the settings of the engines and of weight syncs; None if the run generates nothing."""
        return None

    def parts(self) -> Iterator[tuple[AnyConfig, dict[str, str]]]:
        """Yields the configurations that this one holds besides its own, each with the keys that differ: the key there
        -> the key here."""
        yield from ()

    def nodes_per_engine(self) -> int:
        """Returns the number of nodes that each engine spans."""
        return 1

    def engine_nodes(self) -> PlacementConfig | None:
        """Returns the placement of engines on separate nodes; None if engines are on trainer nodes."""
        return None

    def step_size(self) -> StepSize:
        """Returns the sizes of one step."""
        rows = self.data_uses()["data"].rows_per_step
        return StepSize(learnt=rows, minibatch=rows)

    @abstractmethod
    def data_uses(self) -> dict[str, DataUse]:
        """Returns every data section by its key, one of which is `data`."""

    def sources(self) -> dict[str, tuple[SourceConfig, ...]]:
        """Returns the training sources, by the key that names them."""
        return {f"{key}.train": use.cfg.train for key, use in self.data_uses().items()}

    def reread_files(self) -> Iterator[tuple[str, str]]:
        """Yields (key, path) of files and directories, besides the data, that every start of the run reads again.

        Checkpoints do not contain these files.
        """
        return iter(())

    def rewards(self) -> RewardConfig | None:
        """Returns the reward settings; None if samples have no rewards."""
        return None

    def reward_servers(self) -> dict[str, ServerConfig]:
        """Returns the scorers behind HTTP, by their keys."""
        rewards = self.rewards()
        servers = rewards.servers if rewards is not None else {}
        return {f"reward.servers.{name}": server for name, server in servers.items()}

    def teacher_urls(self) -> dict[str, str]:
        """Returns the addresses of engines that serve teachers, by their keys."""
        return {}

    def algorithm_used(self) -> AlgorithmConfig | None:
        """Returns the settings of advantages and losses; None for trainers without advantages."""
        return None

    def given_urls(self) -> tuple[str, ...]:
        """Returns the addresses of services that mrl does not start and that ranks may have to reach."""
        return ()

    def offloads_memory(self) -> bool:
        """True if the training loop moves models off the device, so that `offload` has an effect."""
        return False

    def min_updates(self, name: str) -> int | None:
        """Returns the minimum number of updates of model `name` in the whole run; None if it depends on the data."""
        return None if self.steps_follow_data() else self.run.steps

    def steps_follow_data(self) -> bool:
        """True if the number of steps is known only after reading the data."""
        return False

    def timed_parts(self) -> tuple[str, ...]:
        """Returns which of `rollout`, `reward` and `sync` of resilience.timeouts_s the run has as parts of a step."""
        return ()

    def held_out(self) -> HeldOutConfig | None:
        """Returns the settings of validation on held-out rows; None if no rows are evaluated (prompts may be)."""
        return None

    def keeps_best(self) -> bool:
        """True if the run keeps the best checkpoint and its export besides the last ones."""
        held_out = self.held_out()
        return held_out is not None and held_out.keep_best

    @property
    def effective_checkpoint(self) -> CheckpointConfig:
        """The checkpoint settings; a run that exists for its profile writes no checkpoints and exports."""
        nothing = {"every_steps": None, "weights_every_steps": None, "export_hf": False}
        return self.checkpoint.model_copy(update=nothing) if self.run.is_for_profile else self.checkpoint

    @abstractmethod
    def summary(self) -> list[tuple[str, str]]:
        """Returns (name, value) rows that describe a step, for the lines printed at the start."""

    @property
    def is_sampling(self) -> bool:
        """True if engines generate responses with the actor's weights."""
        return any(use.is_sampled for use in self.data_uses().values())


class Config(AnyConfig):
    """The keys of every trainer of language models: those with layouts, plans, tokenizers and engines."""

    model: ModelConfig
    actor: TrainConfig = TrainConfig()  # the trained model: its layout and optimizer
    data: DataConfig

    def models(self) -> dict[str, ModelUse]:
        return {"actor": ModelUse(None, self.actor.parallel, self.actor)}

    def built(self) -> dict[str, ModelSpec]:
        several = (own.actor.lora for own in self.adapter_configs().values())
        loras = tuple(lora for lora in several if lora is not None)
        return {"actor": ModelSpec(None, self.actor, is_trained=True, several=loras)}

    def adapter_configs(self) -> Mapping[str, Config]:
        """Returns the configuration of each of several adapters, as that of a run of it alone; empty for one."""
        return {}

    def timed_parts(self) -> tuple[str, ...]:
        validates = self.held_out() is not None and self.data.validation is not None
        return ("rollout",) if validates else ()

    def frozen(self) -> dict[str, str | None]:
        """Returns section -> directory of every language model that is never trained; None: that of the run's model."""
        models = {name: model.path for name, model in self.built().items() if not model.is_trained}
        return {section_of(name): path for name, path in models.items()}

    def reread_files(self) -> Iterator[tuple[str, str]]:
        frozen = self.frozen()
        yield from ((f"{section}.path", path) for section, path in frozen.items() if path is not None)
        exports_drafts = not self.model.from_scratch and has_draft_layers(self.model.path)
        if exports_drafts or (None in frozen.values() and not self.model.from_scratch):
            yield "model.path", self.model.path
        else:
            yield from (("model.path", f"{self.model.path}/{name}") for name in TOKENIZER_FILES)
        if self.model.chat_template is not None:
            yield "model.chat_template", self.model.chat_template
