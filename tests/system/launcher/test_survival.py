"""Runs that survive faults: every kind of fault in every section of a run under the real ft_launcher, and signals."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mrl.config.schema import RolloutConfig
from mrl.inference.start import start_engine
from mrl.observe import read_metrics
from mrl.resilience import EXIT_PREEMPTED
from tests.conftest import TinyModels
from tests.helpers.slow import RUN_SLOW
from tests.helpers.train_tools import ROOT, Train, given, write_config
from tests.system.launcher.test_trainer_faults import fake_engine, wait_until_it_hangs

pytestmark = pytest.mark.longest

STARTING_S = 240.0
RUN_S = 600.0
STEPS = 12 if RUN_SLOW else 8
FAULTS = str(ROOT / "tests/worlds/faults")
# shorter for a reward: the other ranks, which wait in their rollout, must not time out first
LIMITS = {"setup": 25.0, "rollout": 9.0, "reward": 6.0, "update": 9.0, "sync": 9.0, "checkpoint": 9.0}
SECTIONS = tuple(LIMITS)
KINDS = {"kill": "died", "exception": "failed", "hang": "hung"}
OCCURRENCE = {"kill": 2, "exception": 1, "hang": 1}  # in an attempt: after a first step, or in it


def fault(kind: str, section: str) -> dict[str, Any]:
    """Returns a fault of rank 1, or of rank 0 in its own sections; for updates, in the second one of a step."""
    nth = 1 if section == "setup" else OCCURRENCE[kind] * (2 if section == "update" else 1)
    return {"kind": kind, "section": section, "rank": 0 if section == "reward" else 1, "nth": nth}


# test_nothing_is_lost covers a rank killed in a rollout
ONE_OF_EACH = [("exception", "reward"), ("hang", "update"), ("kill", "sync"), ("hang", "checkpoint")]
ALL = [(kind, section) for section in SECTIONS for kind in KINDS]
MATRIX = [fault(kind, section) for kind, section in (ALL if RUN_SLOW else ONE_OF_EACH)]


@dataclass
class Folder:
    """A configuration, its runs, and an engine that outlives all of them."""

    path: Path
    config: Path
    engine: dict[str, Any]

    @property
    def given(self) -> list[str]:
        return [f"rollout.{key}={value}" for key, value in self.engine.items()]

    def train(self, name: str, *overrides: str, faults: list[Any] | None = None, slow: str | None = None) -> Train:
        environment = {"PYTHONPATH": f"{FAULTS}:{ROOT}"} if faults or slow else {}  # others are forked
        if faults is not None:
            (self.path / "faults.json").write_text(json.dumps(faults))
            environment["MRL_TEST_FAULTS"] = str(self.path / "faults.json")
        if slow is not None:
            environment["MRL_TEST_SLOW"] = slow
        return Train(self.path, self.config, f"run.name={name}", *overrides, **environment)

    def result(self, name: str) -> dict[str, bytes | list[int]]:
        """Returns the trained weights, every sample, and the steps with metrics."""
        run = self.path / "runs" / name
        found: dict[str, bytes | list[int]] = {f.name: f.read_bytes() for f in sorted(run.glob("rollouts/*.jsonl"))}
        weights = run / "hf" / "model.safetensors"
        return found | {"weights": weights.read_bytes(), "steps": [int(row["step"]) for row in read_metrics(run)]}


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    path, model = tmp_path_factory.mktemp("survival"), tiny_models("llama")
    config = write_config(
        path,
        model,
        run={"steps": STEPS},
        actor={"parallel": {"tensor": 2}},
        rollout={"engine": "transformers", "sampling": {"max_new_tokens": 8}},
        checkpoint={"every_steps": 1, "export_hf": True},
    )
    with start_engine(RolloutConfig(engine="transformers"), str(model), "float32", path) as engine:
        engine.wait_ready()
        yield Folder(path, config, given(engine, path))


@pytest.fixture(scope="module")
def undisturbed(folder: Folder) -> dict[str, bytes | list[int]]:
    with folder.train("undisturbed", *folder.given) as run:
        assert run.wait(RUN_S) == 0, run.terminal
    return folder.result("undisturbed")


@pytest.fixture(scope="module")
def disturbed(folder: Folder) -> Train:
    """Runs with every fault of the matrix in turn; the last one exceeds the allowed restarts."""
    limits = json.dumps({**LIMITS, "out_of_section": 25.0})
    more = [f"run.max_restarts={len(MATRIX) - 1}", "run.launcher=ft", f"resilience.timeouts_s={limits}"]
    with folder.train("disturbed", *folder.given, *more, faults=MATRIX) as run:
        assert run.wait(RUN_S) == 1, run.terminal
        assert run.left_running() == {}
    return run


def test_every_fault_is_detected_and_answered(folder: Folder, disturbed: Train) -> None:
    rows = [json.loads(line) for line in (folder.path / "runs/disturbed/logs/restarts.jsonl").read_text().splitlines()]
    seen = [(row["kind"], row["section"]) for row in rows]
    assert seen == [(KINDS[f["kind"]], f["section"]) for f in MATRIX[:-1]], disturbed.terminal
    assert all(f["rank"] in row["ranks"] for row, f in zip(rows, MATRIX))


def test_a_restart_is_one_line_and_the_end_one_error(disturbed: Train) -> None:
    lines = disturbed.terminal.splitlines()
    restarts = [line for line in lines if line.startswith("mrl: restart")]
    assert len(restarts) == len(MATRIX) - 1
    for number, (line, told) in enumerate(zip(restarts, MATRIX), 1):
        section, ended = told["section"], f"{KINDS[told['kind']]} in {told['section']}"
        says = {
            "kill": f" {ended}; ",
            "exception": f"rank {told['rank']} {ended}: ",
            "hang": f" {ended} (resilience.timeouts_s.{section} = {LIMITS[section]:g}",
        }
        assert line.startswith(f"mrl: restart {number} of {len(restarts)}: rank"), line
        assert says[told["kind"]] in line, line
        assert ("sitecustomize.Injected: an injected error" in line) == (told["kind"] == "exception"), line
    errors = [line for line in lines if line.startswith("mrl: error")]
    assert len(errors) == 1 and "hung in checkpoint" in errors[0], errors
    assert "Traceback" not in disturbed.terminal


def test_a_hang_leaves_its_stack_in_the_log(folder: Folder, disturbed: Train) -> None:
    log = (folder.path / "runs/disturbed/logs/rank_1.log").read_text()
    hangs = [told for told in MATRIX if told["kind"] == "hang" and told["rank"] == 1]
    seconds = [LIMITS[told["section"]] for told in hangs]
    assert log.count("Timeout (0:00:0") >= sum(limit < 10 for limit in seconds) > 0 and "sitecustomize.py" in log


def test_nothing_is_lost(folder: Folder, disturbed: Train, undisturbed: dict[str, bytes | list[int]]) -> None:
    """The same command resumes the run without losses, with its own engine. Rank 0, the engine's parent, is killed
    while it generates."""
    kill = {"kind": "kill", "section": "rollout", "rank": 0, "nth": 2}
    with folder.train("disturbed", "run.launcher=ft", faults=[kill]) as run:
        assert run.wait(RUN_S) == 0, run.terminal
        assert run.left_running() == {}
    assert "mrl: restart 1 of 3: rank 0 died in rollout; recovered in" in run.terminal
    assert run.terminal.count("the engine has the weights of step") == 2, run.terminal
    assert folder.result("disturbed") == undisturbed
    assert not list((folder.path / "runs/disturbed/checkpoints").glob("*.tmp"))


SAVED_BY_SIGNALS_ONLY = "checkpoint.every_steps=100"


def left_after(run: Train, mark: str, number: signal.Signals, rank: int | None = None) -> None:
    """Signals `mrl train`, or one rank, once `mark` is on the terminal; checks that the run saves and ends."""
    run.wait_for(mark, STARTING_S)
    if rank is None:
        run.signal(number)
    else:
        os.kill(run.pid_of_rank(rank), number)
    assert run.wait(RUN_S) == EXIT_PREEMPTED, run.terminal
    assert run.left_running() == {}
    assert "stopping after step" in run.terminal and "exit code 75" in run.terminal, run.terminal
    assert "error" not in run.terminal and "restart" not in run.terminal, run.terminal


TORCHRUN = ("run.launcher=torchrun", "resilience.straggler_every_steps=2")


def names_the_slow_rank(folder: Folder, run: Train, name: str) -> None:
    assert "resuming from" in run.terminal and "slow rank 1" in run.terminal and "slow rank 0" not in run.terminal
    rows = [json.loads(line) for line in (folder.path / "runs" / name / "stragglers.jsonl").read_text().splitlines()]
    assert rows[0]["steps"] == 2 and rows[0]["update"][1] > rows[0]["update"][0] + 1, rows


def test_a_signal_to_a_rank_saves_and_another_launcher_goes_on(
    folder: Folder, undisturbed: dict[str, bytes | list[int]]
) -> None:
    """A signal to one rank makes the run save and end, and torchrun finishes it. The slow rank is named."""
    more = [*folder.given, SAVED_BY_SIGNALS_ONLY]
    marker = folder.path / "runs/signal/preempted"
    with folder.train("signal", *more) as run:
        left_after(run, "step 1/", signal.SIGUSR1, rank=1)
    assert marker.exists()
    with folder.train("signal", *more, *TORCHRUN, slow="1 0.5") as run:
        assert run.wait(RUN_S) == 0, run.terminal
    assert not marker.exists()
    names_the_slow_rank(folder, run, "signal")
    assert folder.result("signal") == undisturbed


@pytest.mark.slow
def test_signals_save_and_leave(folder: Folder, undisturbed: dict[str, bytes | list[int]]) -> None:
    """The run saves and ends on signals under each launcher in turn, and each one resumes the former's run. One rank is
    slow, and the run names it."""
    more = [*folder.given, SAVED_BY_SIGNALS_ONLY]
    marker = folder.path / "runs/signals/preempted"
    with folder.train("signals", *more) as run:
        left_after(run, "step 1/", signal.SIGTERM)
    with folder.train("signals", *more, *TORCHRUN, slow="1 0.5") as run:
        left_after(run, "slow rank", signal.SIGUSR1, rank=1)
    names_the_slow_rank(folder, run, "signals")
    assert marker.exists()
    with folder.train("signals", *more, "run.launcher=ft") as run:
        left_after(run, "| rollout", signal.SIGUSR1)
    with folder.train("signals", *more) as run:
        assert run.wait(RUN_S) == 0, run.terminal
    assert not marker.exists()
    assert folder.result("signals") == undisturbed


@pytest.mark.parametrize(("launcher", "ranks"), [("mrl", 2), pytest.param("torchrun", 1, marks=pytest.mark.slow)])
def test_what_does_not_fit_into_the_deadline_is_left_undone(folder: Folder, launcher: str, ranks: int) -> None:
    """The run ends at the deadline though its step cannot end, because the engine never answers. One of several ranks
    may fail while the others exit; that failure alone would tell torchrun that the run is not over."""
    with fake_engine(folder.path, "generate_hangs") as url:
        more = [f"rollout.urls=['{url}']", "rollout.request_timeout_s=400.0", "resilience.save_deadline_s=2.0"]
        more += [f"run.launcher={launcher}", f"run.nproc={ranks}", f"actor.parallel.tensor={ranks}"]
        with folder.train(f"late_{launcher}", *more) as run:
            wait_until_it_hangs(run, url)
            run.signal(signal.SIGTERM)
            assert run.wait(60) == EXIT_PREEMPTED, run.terminal
            assert run.left_running() == {}
    assert "within resilience.save_deadline_s" in run.terminal
