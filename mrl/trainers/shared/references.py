"""A reference that is the actor as it was."""

from __future__ import annotations

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
