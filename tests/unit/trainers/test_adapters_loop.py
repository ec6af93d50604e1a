"""The loop of several adapters supports whole steps only."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.core import Rollout
from mrl.trainers.rl.adapters import AdaptersRun
from mrl.trainers.rl.main import RLLoop


@pytest.mark.parametrize("call", ["generate", "learn", "sync_weight", "validation"])
def test_parts_of_a_step_are_refused(call: str) -> None:
    loop: Any = RLLoop(None)
    loop.run = object.__new__(AdaptersRun)
    arguments = [object.__new__(Rollout)] if call == "learn" else []
    with pytest.raises(ValueError, match="trains several policies, whose steps have no parts"):
        getattr(loop, call)(*arguments)
