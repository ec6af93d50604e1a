"""What the configuration of every trainer has, and what it answers for itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Literal

from mrl.config.sections.algorithm import AlgorithmConfig
from mrl.config.sections.base import Section
from mrl.config.sections.data import DataConfig, Form, PreferenceDataConfig, SFTDataConfig, SourceConfig
from mrl.config.sections.held_out import HeldOutConfig
from mrl.config.sections.models import ModelConfig, ParallelConfig, TrainConfig
from mrl.config.sections.placement import PlacementConfig
from mrl.config.sections.reward import RewardConfig, ServerConfig
from mrl.config.sections.rollout import RolloutConfig, SyncConfig
from mrl.config.sections.run import CheckpointConfig, ResilienceConfig, RunConfig
from mrl.config.tokenizer_files import TOKENIZER_FILES


@dataclass(frozen=True)
class ModelUse:
    """How a run uses a model.

    path: its directory; None: that of the run's model
    parallel: its layout; None: it has none of its own
    train: what its training is told; None: it is never trained
    scores: it needs a score head; has_head: it has one, which may start afresh
    """

    path: str | None = None
    parallel: ParallelConfig | None = None
    train: TrainConfig | None = None
    scores: bool = False
    has_head: bool = False


@dataclass(frozen=True)
class DataUse:
    """How a run uses a section of data.

    rows_per_step: of `train`
    is_sampled: responses to its prompts are; otherwise they are learnt from, so every row must have an answer
    preferences: what it has in place of answers; margins: each with one; cuts: long responses lose their ends
    is_evaluated: `validation` is looked at, though nothing is sampled
    """

    cfg: DataConfig
    rows_per_step: int
    is_sampled: bool = False
    preferences: Form | None = None
    margins: bool = False
    cuts: bool = True
    is_evaluated: bool = False

    @property
    def uses_validation(self) -> bool:
        return self.is_sampled or self.is_evaluated

    def needed(self, columns: Container[str]) -> dict[str, str]:
        """The settings that name what a row must have that has these columns -> the names."""
        if isinstance(self.cfg, PreferenceDataConfig) and self.preferences is not None:
            return self.cfg.needed(self.preferences, columns, self.margins)
        if isinstance(self.cfg, SFTDataConfig):
            return self.cfg.needed_keys()
        answer = {} if self.is_sampled else {"answer_key": self.cfg.answer_key}
        return {"prompt_key": self.cfg.prompt_key} | answer

    @property
    def reads_prompts(self) -> bool:
        """Whether what a row has as its prompt is looked at."""
        return self.preferences is not None or "prompt_key" in self.needed(())


@dataclass(frozen=True)
class ModelSpec:
    """A model as a run builds it.

    path: its directory; None: that of the run's model
    train: layout, micro-batches, layers, what it gives up
    scores: it has a value head in place of the output layer
    """

    path: str | None
    train: TrainConfig
    scores: bool = False
    is_trained: bool = False


@dataclass(frozen=True)
class StepSize:
    """What one step works on, in samples unless it says tokens.

    prompts, sampled: that responses are drawn for, and those, in a step without dropped groups; 0: none are drawn
    learnt: that its updates learn from in an epoch; minibatch: in one update
    prompt_tokens, response_tokens: the longest; None: the data says, up to a micro-batch
    passes: names of the models that compute log-probs or values of all samples before the updates
    image_tokens: that pictures may take of a prompt, where the models see some
    replays: whose choice of experts the actor follows
    """

    learnt: int
    minibatch: int
    epochs: int = 1
    prompts: int = 0
    sampled: int = 0
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    passes: tuple[str, ...] = ()
    image_tokens: int = 0
    replays: Literal["off", "trainer", "engine"] = "off"


class AnyConfig(Section):
    """The keys of every trainer. The methods are what the rest asks: it never looks which trainer it is."""

    trainer: str  # what kind of training
    run: RunConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    resilience: ResilienceConfig = ResilienceConfig()

    @property
    def sees_pictures(self) -> bool:
        """Whether its rows may have pictures, and its models see them."""
        return False

    @property
    def has_turns(self) -> bool:
        """Whether its samples are trajectories of several turns."""
        return False

    def imitated(self) -> SFTDataConfig | None:
        """How rows of answers to imitate are read, where it has such rows."""
        return None

    def models(self) -> dict[str, ModelUse]:
        """Every language model of the run, by the section that its keys `path`, `parallel` and `optimizer` are in."""
        return {}

    def built(self) -> dict[str, ModelSpec]:
        """Every language model that the run has weights of, by its name."""
        return {}

    def copies(self) -> dict[str, bool]:
        """Float32 weights that are kept beside the actor's, by name, and whether they are in host memory."""
        return {}

    def engines(self) -> tuple[RolloutConfig, SyncConfig] | None:
        """What samples, and how it gets the weights; None: nothing does."""
        return None

    def nodes_per_engine(self) -> int:
        """How many nodes have an engine together."""
        return 1

    def engine_nodes(self) -> PlacementConfig | None:
        """The nodes that have the engines, where none of the trainer's has one; None: there are no such nodes."""
        return None

    def step_size(self) -> StepSize:
        """What one step works on."""
        rows = self.data_uses()["data"].rows_per_step
        return StepSize(learnt=rows, minibatch=rows)

    @abstractmethod
    def data_uses(self) -> dict[str, DataUse]:
        """Every section that says where rows come from, by its key; `data` is one of them."""

    def sources(self) -> dict[str, tuple[SourceConfig, ...]]:
        """Every key that says what is learnt from."""
        return {f"{key}.train": use.cfg.train for key, use in self.data_uses().items()}

    def reread_files(self) -> Iterator[tuple[str, str]]:
        """(key, path) of all files and directories beside the data that the run is made of whenever it starts, as no
        checkpoint has what they hold."""
        return iter(())

    def rewards(self) -> RewardConfig | None:
        """What scores the samples; None: nothing does."""
        return None

    def reward_servers(self) -> dict[str, ServerConfig]:
        """Scorers behind HTTP, by the keys that describe them."""
        rewards = self.rewards()
        servers = rewards.servers if rewards is not None else {}
        return {f"reward.servers.{name}": server for name, server in servers.items()}

    def algorithm_used(self) -> AlgorithmConfig | None:
        """What makes advantages of scores, and losses of these; None: nothing does."""
        return None

    def given_urls(self) -> tuple[str, ...]:
        """Addresses of services, started by somebody else, that ranks may have to reach."""
        return ()

    def offloads_memory(self) -> bool:
        """Whether its loop says what must be on the device when, so that `offload` has an effect."""
        return False

    def min_updates(self, name: str) -> int | None:
        """How many updates of the model under `name` the whole run makes at least; None: only the data tells."""
        return None if self.steps_follow_data() else self.run.steps

    def steps_follow_data(self) -> bool:
        """Whether the number of steps is known only when the data has been read."""
        return False

    def held_out(self) -> HeldOutConfig | None:
        """When rows of data.validation are looked at; None: no rows are, though there may be prompts."""
        return None

    def keeps_best(self) -> bool:
        """Whether one more checkpoint and one more export than the last ones are kept."""
        held_out = self.held_out()
        return held_out is not None and held_out.keep_best

    @property
    def effective_checkpoint(self) -> CheckpointConfig:
        """What the run leaves to go on from and to use: nothing, where it is made for its profile."""
        nothing = {"every_steps": None, "weights_every_steps": None, "export_hf": False}
        return self.checkpoint.model_copy(update=nothing) if self.run.is_for_profile else self.checkpoint

    @abstractmethod
    def summary(self) -> list[tuple[str, str]]:
        """Name and value of what a step does, for the lines that are printed at the start."""

    @property
    def is_sampling(self) -> bool:
        """Whether the run samples responses, from engines that it gives its weights."""
        return any(use.is_sampled for use in self.data_uses().values())


class Config(AnyConfig):
    """The keys of every trainer of language models, which layouts, plans, tokenizers and engines are about."""

    model: ModelConfig
    actor: TrainConfig = TrainConfig()  # the trained model: its layout and optimizer
    data: DataConfig

    def models(self) -> dict[str, ModelUse]:
        return {"actor": ModelUse(None, self.actor.parallel, self.actor)}

    def built(self) -> dict[str, ModelSpec]:
        return {"actor": ModelSpec(None, self.actor, is_trained=True)}

    def frozen(self) -> dict[str, str | None]:
        """Every language model that is never trained, by its section -> its directory; None: that of the run's
        model."""
        models = {name: model.path for name, model in self.built().items() if not model.is_trained}
        return {"reward.model" if name == "reward" else name: path for name, path in models.items()}

    def reread_files(self) -> Iterator[tuple[str, str]]:
        frozen = self.frozen()
        yield from ((f"{section}.path", path) for section, path in frozen.items() if path is not None)
        if None in frozen.values() and not self.model.from_scratch:
            yield "model.path", self.model.path
        else:
            yield from (("model.path", f"{self.model.path}/{name}") for name in TOKENIZER_FILES)
        if self.model.chat_template is not None:
            yield "model.chat_template", self.model.chat_template
