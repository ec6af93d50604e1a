"""Forward, backward and update of one model under one layout."""

from mrl import platform

platform.install()  # before anything below imports megatron.core

from mrl.learner.learner import Learner, Loss, LossParts, Term  # noqa: E402

__all__ = ["Learner", "Loss", "LossParts", "Term"]
