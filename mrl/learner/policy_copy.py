"""Weights beside a learner's own: their moving average, or what they were some steps ago."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from mrl import platform
from mrl.core import Rollout
from mrl.learner.learner import Learner
from mrl.learner.optimizer import own_ranges, publish_own_ranges


class PolicyCopy:
    """A second set of a trained policy's weights: at first the same as its own.

    They are float32 whatever the model's dtype (a bfloat16 average would stand still: its steps are far below 1/256 of
    a weight), and cut as the optimizer cuts them: each data-parallel rank keeps the range that it updates. There is no
    second model: to compute with them the learner takes them for a while.

    offload: keep them in host memory
    """

    def __init__(self, learner: Learner, *, offload: bool) -> None:
        self.learner = learner
        self._home = torch.device("cpu") if offload else platform.device()
        self.kept = self._own()

    @torch.no_grad()
    def follow(self, share: float) -> None:
        """kept <- kept + share * (the learner's - kept): 1 - decay of a moving average; 1 takes the learner's weights.

        Call it after an update. Every rank moves its own part; nothing is sent.
        """
        for parameter, main in self.learner.main_weights():
            kept = self.kept[parameter]
            kept.copy_(kept.to(main.device).lerp_(main, share))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[Learner]:
        """The learner, with these weights; afterwards it has its own again, to the bit. Collective.

        It must not be updated or saved meanwhile. After an error it keeps the weights that it has: an error on one rank
        must not wait for the others here.
        """
        own = self._own()
        self._give(self.kept)
        yield self.learner
        self._give(own)

    def log_probs(self, rollout: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies as Learner.log_probs, [R] each, under these weights."""
        with self.in_place() as learner:
            return learner.log_probs(rollout, temperature)

    def _own(self) -> dict[Tensor, Tensor]:
        return {parameter: main.to(self._home, copy=True) for parameter, main in self.learner.main_weights()}

    @torch.no_grad()
    def _give(self, weights: dict[Tensor, Tensor]) -> None:
        """To the model alone: main weights and moments stay what they are, and need not be on the device."""
        self.learner.memory.require("parameters", "taking other weights")
        for parameter, own in own_ranges(self.learner.optimizer):
            own.copy_(weights[parameter])
        publish_own_ranges(self.learner.chunks)
        self.learner.memory.changed()
