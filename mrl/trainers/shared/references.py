"""References that are the actor itself: as it was, or without its adapters."""

from __future__ import annotations

from torch import Tensor

from mrl.core import Rollout
from mrl.learner import Learner
from mrl.learner.policy_copy import PolicyCopy


class RefreshedReference(PolicyCopy):
    """The actor as it was some steps ago, at first its initial weights; it moves by `share` of the way every `every`
    steps."""

    def __init__(self, actor: Learner, every: int, share: float) -> None:
        super().__init__(actor, offload=True)
        self._every, self._share = every, share

    def after_step(self, step: int) -> None:
        """step: how many are done"""
        if step % self._every == 0:
            self.follow(self._share)


class ActorWithoutAdapters:
    """The weights that an actor's adapters were begun with: no model of its own, and no copy of any weight."""

    def __init__(self, actor: Learner) -> None:
        assert actor.adapters is not None
        self._actor, self._adapters = actor, actor.adapters

    def log_probs(self, rollout: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies as Learner.log_probs, [R] each, under these weights."""
        with self._adapters.off():
            return self._actor.log_probs(rollout, temperature)
