"""The loop of several adapters supports whole steps only."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.core import Rollout, StepStats
from mrl.trainers.rl import loop as rl_loop
from mrl.trainers.rl.adapters import AdaptersRun
from mrl.trainers.rl.main import RLLoop
from mrl.trainers.rl.run import RLRun
from mrl.trainers.shared.callbacks import Callbacks, TrainerCallback, TrainerState


@pytest.mark.parametrize("call", ["generate", "learn", "sync_weight", "validation"])
def test_parts_of_a_step_are_refused(call: str) -> None:
    loop: Any = RLLoop(None)
    loop.run = object.__new__(AdaptersRun)
    arguments = [object.__new__(Rollout)] if call == "learn" else []
    with pytest.raises(ValueError, match="trains several policies, whose steps have no parts"):
        getattr(loop, call)(*arguments)


class Told(TrainerCallback):
    def __init__(self) -> None:
        self.told: list[tuple[str, int, dict[str, float]]] = []

    def on_evaluate(self, state: TrainerState, metrics: Any) -> None:
        self.told.append((state.adapter, state.step, dict(metrics)))


def test_callbacks_are_called_for_each_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    run, told, state = object.__new__(AdaptersRun), Told(), TrainerState()
    run.adapters = {name: object.__new__(RLRun) for name in ("a", "b")}
    run.set_callbacks(Callbacks([told], state))

    def validate(own: RLRun, step: int, stats: StepStats) -> None:
        stats.metrics["validation/mean"] = 0.5
        own.callbacks("on_evaluate", stats.metrics, step=step)

    monkeypatch.setattr(rl_loop, "validate", validate)
    stats = StepStats(3)
    for name in run.adapters:
        run._validate(name, 3, stats)
    assert told.told == [(name, 3, {"validation/mean": 0.5}) for name in ("a", "b")] and state.adapter == ""
    assert stats.metrics == {"a/validation/mean": 0.5, "b/validation/mean": 0.5}
