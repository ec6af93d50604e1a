"""Complete runs of `mrl train`: an uninterrupted run, a killed and resumed run, and their comparison."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from tests.helpers import zygote
from tests.helpers.train_tools import MEASURED, Train

RUN_S = 300.0

LAST, ATTEMPTS = 4, 5  # runs end with step LAST; the kill must come before that step is done

VOCAB = 320


def results(run_dir: Path) -> dict[int, dict[str, float]]:
    """Returns the rows of metrics.jsonl by step, without speed and memory, which differ between equal runs."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len({row["step"] for row in rows}) == len(rows), "a step is there twice"
    return {row["step"]: {k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows}


def samples(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        file.name: [json.loads(line) for line in file.open()]  # splitlines would cut at a response's U+2028 too
        for file in sorted((run_dir / "rollouts").iterdir())
    }


def train(folder: Path, *arguments: str | Path) -> Train:
    with Train(folder, *arguments) as run:
        assert run.wait(RUN_S) == 0, run.terminal[-6000:]
        assert run.left_running() == {}
    return run


def train_and_kill(folder: Path, run_dir: Path, *arguments: str | Path) -> None:
    """Trains until step 3, and kills the launcher and every rank with SIGKILL once the checkpoint of step 2 is
    complete.

    On a busy machine some quick steps may be done before the signal arrives; then the run is repeated from the start.
    """
    for _ in range(ATTEMPTS):
        _train_and_kill(folder, *arguments)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last line may be incomplete
        if max(row["step"] for row in rows) <= LAST:
            return
        shutil.rmtree(run_dir)
    raise AssertionError(f"{run_dir} went beyond step {LAST}, {ATTEMPTS} times")


def _train_and_kill(folder: Path, *arguments: str | Path) -> None:
    with Train(folder, *arguments) as run:
        run.wait_for("step 3/50", RUN_S)
        run.wait_for("step_2 is complete", RUN_S)
        for pid, command in run.processes().items():
            if " train " in command:
                os.kill(pid, signal.SIGKILL)
        run.wait(30)
        assert run.left_running() == {}


def difference(a: Path, b: Path) -> dict[str, float]:
    """Returns the difference of the checkpoints of step 4, by learner and kind of tensor
    (tests/worlds/compare_checkpoints.py)."""
    steps = [folder / "checkpoints/step_4" for folder in (a, b)]
    done = zygote.run("tests.worlds.compare_checkpoints", *steps, str(VOCAB))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


class Runs:
    """An uninterrupted run, and a run that is killed after step 3 and resumed. `moved` is a copy of the latter at its
    death.

    before, after: settings of the second run before and after the kill, which must not change any result
    """

    def __init__(self, folder: Path, config: Path, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> None:
        self.folder, self.config = folder, config
        self.whole, self.killed, self.moved = (folder / "runs" / name for name in ("whole", "killed", "moved"))
        train(folder, config, "run.name=whole", "run.steps=4")
        train_and_kill(folder, self.killed, config, "run.name=killed", "run.steps=50", *before)
        self.rows_when_killed = results(self.killed)
        shutil.copytree(self.killed, self.moved)
        self.terminal = train(folder, config, "run.name=killed", "run.steps=4", *after).terminal


def assert_the_same(runs: Runs) -> None:
    assert max(runs.rows_when_killed) >= 3, "nothing had to be made again"
    assert results(runs.killed) == results(runs.whole)
    assert samples(runs.killed) == samples(runs.whole)
    assert set(difference(runs.whole, runs.killed).values()) == {0.0}
