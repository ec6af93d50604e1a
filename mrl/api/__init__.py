"""The Python interface: trainers as classes, and sessions for loops of your own. See docs/api.md."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrl.api.session import Critic as Critic
    from mrl.api.session import LossBatch as LossBatch
    from mrl.api.session import Policy as Policy
    from mrl.api.session import Reference as Reference
    from mrl.api.session import Session as Session
    from mrl.api.session import SessionEngine as SessionEngine
    from mrl.api.session import Teacher as Teacher

__all__ = ["Critic", "LossBatch", "Policy", "Reference", "Session", "SessionEngine", "Teacher"]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("mrl.api.session"), name)
