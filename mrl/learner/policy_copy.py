"""Second set of a learner's weights: a moving average, or the weights of some steps ago."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from mrl import platform
from mrl.core import Rollout
from mrl.learner.learner import Learner
from mrl.learner.optimizer import gather_own_ranges, own_ranges


class PolicyCopy:
    """Second set of a trained policy's weights, initially equal to the policy's.

    The copy is float32 whatever the model's dtype: the steps of a bfloat16 average would be lost to rounding, far below
    1/256 of a weight. It is sharded like the optimizer: each data-parallel rank keeps the range that it updates. There
    is no second model; the learner loads these weights temporarily to compute with them.

    offload: keep the copy in host memory
    """

    def __init__(self, learner: Learner, *, offload: bool) -> None:
        self.learner = learner
        self._home = torch.device("cpu") if offload else platform.device()
        self.kept = self._own()

    @torch.no_grad()
    def follow(self, share: float) -> None:
        """Updates kept <- kept + share * (the learner's - kept). share: 1 - decay of a moving average; 1 copies the
        learner.

        Call it after an update. Every rank updates its own shard without communication.
        """
        for parameter, main in self.learner.main_weights():
            kept = self.kept[parameter]
            kept.copy_(kept.to(main.device).lerp_(main, share))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[Learner]:
        """Yields the learner with these weights and restores its own weights, bit for bit, afterwards. Collective.

        The learner must not be updated or saved meanwhile. After an error the learner keeps the copy's weights:
        restoring is collective, and an error on one rank would deadlock.
        """
        own = self._own()
        self._give(self.kept)
        yield self.learner
        self._give(own)

    def log_probs(self, rollout: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
        """Returns log-probs and entropies as Learner.log_probs does, [R] each, under these weights."""
        with self.in_place() as learner:
            return learner.log_probs(rollout, temperature)

    def _own(self) -> dict[Tensor, Tensor]:
        return {parameter: main.to(self._home, copy=True) for parameter, main in self.learner.main_weights()}

    @torch.no_grad()
    def _give(self, weights: dict[Tensor, Tensor]) -> None:
        """Writes weights into the model alone: main weights and moments stay unchanged and may be offloaded."""
        self.learner.memory.require("parameters", "swapping weights")
        for parameter, own in own_ranges(self.learner.optimizer):
            own.copy_(weights[parameter])
        gather_own_ranges(self.learner.chunks)
        self.learner.memory.changed()
