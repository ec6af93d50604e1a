"""External trackers: the data that they get, outages, and resumed runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from mrl.config.schema import SFTConfig
from mrl.core import StepStats
from mrl.observe import Recorder, trackers
from mrl.observe.remote_tracker import Outcome, RemoteTracker, TrackedStep, TrackerQueue

WAIT_S = 30.0


class Elsewhere(RemoteTracker):
    """A tracker in this process. down: while true, it raises ConnectionError"""

    package: ClassVar[str] = "json"

    def __init__(self, down: bool = False) -> None:
        self.down, self.steps, self.opened, self.outcome = down, [], [], None

    def open(self, run_id: str | None) -> str:
        self._answer()
        self.opened.append(run_id)
        return run_id or f"run-{len(self.opened)}"

    def where(self) -> str:
        return "http://elsewhere/runs"

    def send(self, rows: Sequence[TrackedStep]) -> None:
        self._answer()
        self.steps += [(row.step, row.metrics["loss"]) for row in rows]

    def close(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def _answer(self) -> None:
        if self.down:
            raise ConnectionError("connection refused")


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def log(run_dir: Path, remote: Elsewhere, steps: range, runs: dict[str, str] | None = None) -> str:
    """Logs these steps, each with the loss `step / 10`; returns the tracker's run id."""
    sender = TrackerQueue("elsewhere", remote, run_dir, retry_s=0.01)
    recorder = Recorder(run_dir, 9, {"elsewhere": sender}, live=False)
    with recorder:
        recorder.resume_runs(runs or {})
        for step in steps:
            recorder.log(StepStats(step, {"loss": step / 10}))
    return recorder.tracker_runs()["elsewhere"] if recorder.tracker_runs() else ""


def test_every_step_arrives_once_and_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remote = Elsewhere()
    assert log(tmp_path, remote, range(1, 5)) == "run-1"
    assert remote.steps == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)] and remote.outcome == "finished"
    assert capsys.readouterr().out.count("elsewhere: http://elsewhere/runs") == 1


def test_one_that_is_down_costs_a_warning_and_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remote = Elsewhere(down=True)
    sender = TrackerQueue("elsewhere", remote, tmp_path, retry_s=0.01)
    with Recorder(tmp_path, 9, {"elsewhere": sender}, live=False) as recorder:
        for step in (1, 2, 3):
            recorder.log(StepStats(step, {"loss": step / 10}))
            time.sleep(0.05)
        remote.down = False
        until(lambda: remote.steps)
        recorder.log(StepStats(4, {"loss": 0.4}))
    shown = capsys.readouterr().out
    assert remote.steps == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert shown.count("accepts no metrics at the moment (ConnectionError: connection refused)") == 1
    assert "elsewhere responds again and has received steps 1 to 3" in shown


def test_what_never_arrived_is_named_and_sent_when_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert log(tmp_path, Elsewhere(down=True), range(1, 4)) == ""
    assert f"elsewhere did not receive the metrics of steps 1 to 3: they are in {tmp_path}" in capsys.readouterr().out
    remote = Elsewhere()
    log(tmp_path, remote, range(4, 6))
    assert [step for step, _ in remote.steps] == [1, 2, 3, 4, 5]


def test_a_run_that_goes_on_is_the_same_run_there(tmp_path: Path) -> None:
    """A resumed run is the same for the tracker, even if only the checkpoint has its id. Repeated steps are resent."""
    first = log(tmp_path, Elsewhere(), range(1, 6))
    again = Elsewhere()
    assert log(tmp_path, again, range(4, 7)) == first
    assert again.opened == [first] and [step for step, _ in again.steps] == [4, 5, 6]
    (tmp_path / "trackers/elsewhere.json").unlink()
    (tmp_path / "metrics.jsonl").unlink()
    lost = Elsewhere()
    assert log(tmp_path, lost, range(7, 8), {"elsewhere": first, "other": "x"}) == first
    assert lost.opened == [first]


@pytest.mark.parametrize(("error", "outcome"), [(RuntimeError, "failed"), (SystemExit, "stopped")])
def test_it_hears_how_the_run_ended(error: type[BaseException], outcome: str, tmp_path: Path) -> None:
    remote = Elsewhere()
    with (
        pytest.raises(error),
        Recorder(tmp_path, 2, {"e": TrackerQueue("e", remote, tmp_path)}, live=False) as recorder,
    ):
        recorder.log(StepStats(1, {"loss": 1.0}))
        raise error
    assert remote.outcome == outcome


def test_one_that_hangs_does_not_hold_up_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.observe.remote_tracker.CLOSE_S", 0.1)
    remote = Elsewhere()
    remote.open = lambda run_id: time.sleep(WAIT_S)  # type: ignore[method-assign,assignment,return-value]
    began = time.monotonic()
    log(tmp_path, remote, range(1, 3))
    assert time.monotonic() - began < WAIT_S / 2


def config(root: Path, **run: object) -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "trainer": "sft",
            "run": {"name": "one", "root": str(root), "steps": 3, **run},
            "model": {"path": "models/tiny"},
            "data": {"train": "http://me:hidden@host/train.jsonl"},
            "batch": {"samples_per_step": 4},
        }
    )


def tracked(cfg: SFTConfig, steps: range) -> dict[str, str]:
    run_dir = Path(cfg.run.root) / cfg.run.name
    run_dir.mkdir(exist_ok=True)
    with Recorder(run_dir, 3, trackers.make(cfg, run_dir), live=False) as recorder:
        for step in steps:
            recorder.log(StepStats(step, {"loss": step / 10, "reward/a:b": 1.0}, {"update": 2.0}))
    return recorder.tracker_runs()
