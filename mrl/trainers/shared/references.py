"""Reference policies made from the actor: a delayed copy, or the actor without its adapters."""

from __future__ import annotations

from torch import Tensor

from mrl.core import Rollout
from mrl.learner import Learner
from mrl.learner.policy_copy import PolicyCopy


class RefreshedReference(PolicyCopy):
    """Delayed copy of the actor. It starts at the initial weights and moves by `share` of the distance to the actor
    every `every` steps."""

    def __init__(self, actor: Learner, every: int, share: float) -> None:
        super().__init__(actor, offload=True)
        self._every, self._share = every, share

    def after_step(self, step: int) -> None:
        """Refreshes the reference if due. step: steps done"""
        if step % self._every == 0:
            self.follow(self._share)


class ActorWithoutAdapters:
    """The actor with its adapters off. It needs no model of its own and no copy of any weight."""

    def __init__(self, actor: Learner) -> None:
        assert actor.adapters is not None
        self._actor, self._adapters = actor, actor.adapters

    def log_probs(self, rollout: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies as Learner.log_probs, [R] each, under the base weights."""
        with self._adapters.off():
            return self._actor.log_probs(rollout, temperature)
