"""What the configuration of every trainer has, and what it answers for itself."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from mrl.config.sections.algorithm import AlgorithmConfig
from mrl.config.sections.base import Section
from mrl.config.sections.data import DataConfig, PreferenceDataConfig
from mrl.config.sections.models import ModelConfig, ParallelConfig, TrainConfig
from mrl.config.sections.placement import PlacementConfig
from mrl.config.sections.reward import RewardConfig
from mrl.config.sections.rollout import RolloutConfig, SyncConfig
from mrl.config.sections.run import CheckpointConfig, ResilienceConfig, RunConfig


@dataclass(frozen=True)
class ModelUse:
    """How a run uses a model.

    path: its directory; None: that of the run's model
    parallel: its layout; None: it has none of its own
    train: what its training is told; None: it is never trained
    scores: it needs a score head
    """

    path: str | None = None
    parallel: ParallelConfig | None = None
    train: TrainConfig | None = None
    scores: bool = False


@dataclass(frozen=True)
class DataUse:
    """How a run uses a section of data.

    rows_per_step: of `train`
    is_sampled: responses to its prompts are; otherwise they are learnt from, so every row must have an answer
    preferences: it has pairs, or responses with a label, in place of answers
    """

    cfg: DataConfig
    rows_per_step: int
    is_sampled: bool = False
    preferences: Literal["pairs", "labels"] | None = None

    @property
    def needed(self) -> dict[str, str]:
        """The settings that name what every row has -> the names."""
        if isinstance(self.cfg, PreferenceDataConfig) and self.preferences is not None:
            return self.cfg.needed(self.preferences)
        answer = {} if self.is_sampled else {"answer_key": self.cfg.answer_key}
        return {"prompt_key": self.cfg.prompt_key} | answer


@dataclass(frozen=True)
class Built:
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
    """

    learnt: int
    minibatch: int
    epochs: int = 1
    prompts: int = 0
    sampled: int = 0
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    passes: tuple[str, ...] = ()


class Config(Section):
    """The keys of every trainer. The methods are what the rest asks: it never looks which trainer it is."""

    trainer: str  # what kind of training
    run: RunConfig
    model: ModelConfig
    actor: TrainConfig = TrainConfig()  # The model that is trained: its layout and optimizer
    data: DataConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    resilience: ResilienceConfig = ResilienceConfig()

    def models(self) -> dict[str, ModelUse]:
        """Every model of the run, by the section that its keys `path`, `parallel` and `optimizer` are in."""
        return {"actor": ModelUse(None, self.actor.parallel, self.actor)}

    def built(self) -> dict[str, Built]:
        """Every model that the run has weights of, by its name."""
        return {"actor": Built(None, self.actor, is_trained=True)}

    def copies(self) -> dict[str, bool]:
        """Float32 weights that are kept beside the actor's, by name, and whether they are in host memory."""
        return {}

    def engines(self) -> tuple[RolloutConfig, SyncConfig] | None:
        """What samples, and how it gets the weights; None: nothing does."""
        return None

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

    def rewards(self) -> RewardConfig | None:
        """What scores the samples; None: nothing does."""
        return None

    def algorithm_used(self) -> AlgorithmConfig | None:
        """What makes advantages of scores, and losses of these; None: nothing does."""
        return None

    def given_urls(self) -> tuple[str, ...]:
        """Addresses of services, started by somebody else, that ranks may have to reach."""
        return ()

    def gives_up_memory(self) -> bool:
        """Whether its loop says what must be on the device when, so that `offload` has an effect."""
        return False

    @abstractmethod
    def summary(self) -> list[tuple[str, str]]:
        """Name and value of what a step does, for the lines that are printed at the start."""

    @property
    def is_sampling(self) -> bool:
        """Whether the run samples responses, from engines that it gives its weights."""
        return any(use.is_sampled for use in self.data_uses().values())
