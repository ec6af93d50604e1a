"""Forward, backward and update of one model under one layout."""

from mrl import platform

platform.install()  # before anything below imports megatron.core

from mrl.learner.learner import Learner  # noqa: E402
from mrl.learner.loss_terms import Loss, LossParts, LossTerm  # noqa: E402

__all__ = ["Learner", "Loss", "LossParts", "LossTerm"]
