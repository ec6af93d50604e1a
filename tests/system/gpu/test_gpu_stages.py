"""The driver of `make test-gpu`, with pretended stages: what one lacks, or dies of, hides nothing of another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mrl import platform
from tools.gpu import run, stage
from tools.gpu.stage import Failed, Numbers, Setting, Skipped, require
from tools.gpu.stage_cuda import same_losses
from tools.gpu.trained import environment, training_numbers

HEAD = {"stage": "cuda", "checks": ["one", "two", "three"], "gpu": {"card": "Card"}}
PASSED = {"check": "one", "verdict": "passed", "numbers": {"x": 1.0}, "seconds": 0.1}
BEGUN = {"check": "two", "verdict": "begun"}


def pretended(lines: Path, *rows: object, then: str = "") -> list[str]:
    """A program that leaves these lines, and then does that."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return [sys.executable, "-c", f"from pathlib import Path\nPath({str(lines)!r}).write_text({text!r})\n{then}"]


def outcome(lines: Path, *rows: object, then: str = "", limit_s: float = 60.0) -> run.Outcome:
    return run.run_stage("cuda", pretended(lines, *rows, then=then), lines, limit_s)


def test_what_was_found_before_a_crash_is_kept(tmp_path: Path) -> None:
    found = outcome(tmp_path / "lines", HEAD, PASSED, BEGUN, then="import os; os.abort()")
    assert [check["verdict"] for check in found.checks] == ["passed", "failed", "not run"]
    assert found.checks[0]["numbers"] == {"x": 1.0} and "SIGABRT" in found.checks[1]["reason"]
    assert found.verdict == "failed" and found.gpu == {"card": "Card"}
    assert "failed: two: killed by SIGABRT" in run.summary(found)


def test_a_stage_that_does_not_start_has_failed(tmp_path: Path) -> None:
    found = run.run_stage("cuda", [sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "lines", 60.0)
    assert [(c["check"], c["verdict"]) for c in found.checks] == [("start", "failed")]
    assert found.checks[0]["reason"] == "the stage ended with exit code 3"


def test_a_stage_that_hangs_ends_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child = (
        f"import subprocess, time; c = subprocess.Popen(['sleep', '60']); Path({str(pid)!r}).write_text(str(c.pid)); "
    )
    found = outcome(tmp_path / "lines", HEAD, PASSED, BEGUN, then=child + "time.sleep(60)", limit_s=5.0)
    assert found.checks[1] == {"check": "two", "verdict": "failed", "reason": "the stage's 5 s were over"}
    end = time.monotonic() + 60
    while (stat := Path(f"/proc/{pid.read_text()}/stat")).exists() and " Z " not in stat.read_text():
        assert time.monotonic() < end, "its child is still there"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [(["passed", "skipped"], "passed"), (["skipped"], "skipped"), (["failed", "passed"], "failed"),
     (["passed", "not run"], "not run")],
)  # fmt: skip
def test_the_verdict_of_a_stage(verdicts: list[str], verdict: str) -> None:
    assert run.Outcome("cuda", checks=[{"verdict": one} for one in verdicts]).verdict == verdict


def test_all_that_is_asked_for_runs_and_each_leaves_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one crashes, the second has nothing to do it with, the third passes."""
    monkeypatch.setattr(platform, "gpu_count", lambda: 1)
    skipped = {"check": "one", "verdict": "skipped", "reason": "not there"}
    programs = {"cuda": ([], "raise SystemExit(1)"), "engine": ([HEAD | {"checks": ["one"]}, skipped], ""),
                "speed": ([HEAD | {"checks": ["one"]}, PASSED], "")}  # fmt: skip

    def started(name: str, command: list[str], lines: Path, limit_s: float) -> run.Outcome:
        rows, then = programs[name]
        return real(name, pretended(lines, *rows, then=then), lines, limit_s)

    real = run.run_stage
    monkeypatch.setattr(run, "run_stage", started)
    results, work = tmp_path / "results", ["--work", str(tmp_path / "work")]
    assert run.main(["--stages", "cuda,engine,speed", "--results", str(results), *work, "--commit", "0123"]) == 1
    files = {file.stem: json.loads(file.read_text()) for file in results.iterdir()}
    assert {name: file["verdict"] for name, file in files.items()} == {
        "cuda": "failed", "engine": "skipped", "speed": "passed",
    }  # fmt: skip
    assert {"date", "versions", "card", "seconds", "checks"} < files["speed"].keys()
    assert files["speed"]["commit"] == "0123"
    assert "engine: skipped" in capsys.readouterr().out
    assert run.main(["--stages", "speed", "--results", str(results), "--work", str(tmp_path / "again")]) == 0


def test_again_makes_what_has_not_passed_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: a check that was kept says still what it passed on."""
    monkeypatch.setattr(platform, "gpu_count", lambda: 1)
    commands: list[list[str]] = []
    failed = {"check": "two", "verdict": "failed", "reason": "wrong"}
    made = [[PASSED, failed], [failed], [{**failed, "verdict": "passed"}]]

    def started(name: str, command: list[str], lines: Path, limit_s: float) -> run.Outcome:
        commands.append(command)
        return run.Outcome(name, 1.0, {"card": f"Card {len(commands)}"}, made[len(commands) - 1])

    monkeypatch.setattr(run, "run_stage", started)
    where = ["--stages", "cuda", "--results", str(tmp_path), "--work"]
    each = (["--commit", "1"], ["--again", "--commit", "2"], ["--again"])
    codes = [run.main([*where, str(tmp_path / f"work {i}"), *more]) for i, more in enumerate(each)]
    assert codes == [1, 1, 0]
    assert "--leave" not in commands[0] and commands[2][commands[2].index("--leave") + 1] == "one"
    last = json.loads((tmp_path / "cuda.json").read_text())
    assert [(check["check"], check["verdict"]) for check in last["checks"]] == [("one", "passed"), ("two", "passed")]
    assert last["checks"][0]["of"]["commit"] == "1" and last["checks"][0]["of"]["card"] == "Card 1"
    assert "of" not in last["checks"][1] and last["card"] == "Card 3"


def test_a_check_that_is_left_out_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, object]] = []
    monkeypatch.setattr(stage, "checks_of", lambda name: {"one": lambda setting: {}, "two": lambda setting: {}})
    stage.run("cuda", Setting(tmp_path), lines.append, leave=["one"])
    assert lines[0]["checks"] == ["two"] and {line.get("check") for line in lines[1:]} == {"two"}


def test_without_a_gpu_nothing_is_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu.run", "--results", str(tmp_path / "results")]
    hidden = environment() | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=stage.ROOT, env=hidden, capture_output=True, text=True, timeout=120)
    assert done.returncode == run.NO_GPU and "no GPU" in done.stdout
    assert not (tmp_path / "results").exists()


def test_all_stages_end_within_ten_minutes() -> None:
    assert set(run.LIMITS_S) == set(stage.STAGES) and sum(run.LIMITS_S[name] for name in run.DEFAULT_STAGES) < 600


def test_make_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "test-gpu", "STAGES=cuda,speed", "GPU_PYTHON=python3"],
        cwd=stage.ROOT, capture_output=True, text=True, timeout=60,
        env={name: value for name, value in os.environ.items() if name != "MAKEFLAGS"},
    )  # fmt: skip
    assert "python3 -m tools.gpu.run --stages cuda,speed" in done.stdout, done.stderr


def test_a_check_s_verdict() -> None:
    def fails(setting: Setting) -> Numbers:
        return require({"worst": 0.2}, worst=0.1)

    def skips(setting: Setting) -> Numbers:
        raise Skipped("not there")

    def breaks(setting: Setting) -> Numbers:
        raise ValueError("broken")

    made = [stage.run_check(check, Setting(Path())) for check in (fails, skips, breaks, lambda setting: {"x": 1})]
    assert made == [
        {"verdict": "failed", "reason": "worst 0.2 > 0.1", "numbers": {"worst": 0.2}},
        {"verdict": "skipped", "reason": "not there"},
        {"verdict": "failed", "reason": "ValueError: broken"},
        {"verdict": "passed", "numbers": {"x": 1}},
    ]
    with pytest.raises(Failed):
        require({"worst": float("nan")}, worst=1.0)


def test_losses_of_the_same_steps_are_compared() -> None:
    rows = [{"step": step, "actor/loss": 2.0, "actor/grad_norm": 1.0} for step in (4, 5)]
    assert same_losses(rows, rows, 0.0) == {"apart": 0.0, "equal": True}
    other = [rows[0], rows[1] | {"actor/loss": 2.1}]
    assert same_losses(rows, other, 0.06)["apart"] == pytest.approx(0.05)
    for wrong in (other, rows[:1]):
        with pytest.raises(Failed):
            same_losses(rows, wrong, 0.01)


def test_a_run_whose_updates_were_skipped_has_failed() -> None:
    row = {"step": 1, "actor/loss": 2.0, "actor/skipped": 0.0, "perf/tokens_per_s": 10.0}
    assert training_numbers([row, row | {"actor/loss": 1.0}])["last loss"] == 1.0
    with pytest.raises(Failed, match="1 updates were skipped"):
        training_numbers([row, row | {"actor/skipped": 1.0}])
