"""What the configuration of every trainer has, and what it answers for itself."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from mrl.config.sections.algorithm import AlgorithmConfig
from mrl.config.sections.base import Section
from mrl.config.sections.data import DataConfig
from mrl.config.sections.models import ModelConfig, ParallelConfig, TrainConfig
from mrl.config.sections.reward import RewardConfig
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
    """

    cfg: DataConfig
    rows_per_step: int
    is_sampled: bool = False


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
