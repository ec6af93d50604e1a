"""A run directory is kept, private and without passwords; a full disk ends only what cannot work without it."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from mrl.cli import main
from mrl.commands import world
from mrl.config import resume as resume_checks
from mrl.config.checks.all import check
from mrl.config.derived import Machine
from mrl.config.loader import dump_resolved
from mrl.config.schema import RLConfig, SFTConfig
from mrl.failure import note
from mrl.launcher.logs import collect_failures, lock_log_dir, open_logs
from mrl.observe import (
    RunDir,
    RunExists,
    move_aside,
    read_metrics,
    refuse_existing,
    write_report,
)
from mrl.preflight.disk_space import check_directory
from mrl.redaction import redact
from mrl.terminal import Terminal
from mrl.trainers.shared.checkpoints import open_run_dir
from mrl.trainers.shared.phases import Phases
from tests.helpers.train_tools import write_config

URL = "http://ann:hunter2@scores.example/v1?token=hunter2&n=3"


def sft(root: Path | str, name: str = "one", **run: Any) -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "trainer": "sft",
            "run": {"name": name, "root": str(root), "steps": 3, **run},
            "model": {"path": "models/tiny"},
            "data": {"train": "train.jsonl"},
            "batch": {"samples_per_step": 4},
        }
    )


def left_by_a_run(folder: Path) -> Path:
    run_dir = folder / "one"
    (run_dir / "rollouts").mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (run_dir / "rollouts/step_1.jsonl").write_text("{}\n")
    (run_dir / "config.yaml").write_text("run: {steps: 7}\n")
    return run_dir


class TestNothingIsWrittenOver:
    def test_what_a_run_without_a_checkpoint_left_is_refused(self, tmp_path: Path) -> None:
        run_dir = left_by_a_run(tmp_path)
        with pytest.raises(RunExists, match=r"one has .* choose another run.name, or set run.existing=move_aside"):
            refuse_existing(sft(tmp_path))
        refuse_existing(sft(tmp_path, existing="move_aside"))
        refuse_existing(sft(tmp_path, name="another"))
        (run_dir / "checkpoints/step_1").mkdir(parents=True)
        (run_dir / "checkpoints/step_1/complete").touch()
        refuse_existing(sft(tmp_path))  # it resumes from there

    def test_a_run_that_did_not_get_far_is_no_obstacle(self, tmp_path: Path) -> None:
        with RunDir.open(sft(tmp_path)) as run_dir:
            (run_dir.path / "metrics.jsonl").touch()
        refuse_existing(sft(tmp_path))

    def test_moved_aside_it_is_a_run_directory_still(self, tmp_path: Path) -> None:
        run_dir = left_by_a_run(tmp_path)
        (run_dir / "logs").mkdir()
        (run_dir / "logs/rank_0.log").write_text("kept open by the launcher")
        aside = move_aside(run_dir)
        assert aside == run_dir / "earlier_1"
        assert read_metrics(aside)[0]["reward/mean"] == 0.5 and (aside / "rollouts/step_1.jsonl").exists()
        assert "step 1 of 7" in write_report(aside).read_text()
        assert {path.name for path in run_dir.iterdir()} == {"earlier_1", "logs", "rollouts"}
        refuse_existing(sft(tmp_path))
        (run_dir / "metrics.jsonl").write_text("{}\n")
        assert move_aside(run_dir).name == "earlier_2"

    def test_a_restart_begins_again_where_its_own_launch_has_written_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A restart may start anew if only its own launch has written to the directory. ft_launcher answers a refusal
        with a restart, and an attempt may end before it has checked the directory."""
        run_dir, cfg = left_by_a_run(tmp_path), sft(tmp_path, trackers=())
        before = (run_dir / "metrics.jsonl").read_bytes()

        def start(cfg: SFTConfig, attempt: int) -> None:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
            with contextlib.ExitStack() as stack:
                open_run_dir(cfg, run_dir, stack)

        for attempt in (0, 1, 2):
            with pytest.raises(RunExists):
                start(cfg, attempt)
        start(sft(tmp_path, trackers=(), existing="move_aside"), 1)
        assert (run_dir / "earlier_1/metrics.jsonl").read_bytes() == before
        (run_dir / "metrics.jsonl").write_bytes(before)
        start(cfg, 2)
        with pytest.raises(RunExists):  # another launch by the same parent, such as a shell
            start(cfg, 0)

    def test_who_was_told_to_stop_before_the_first_checkpoint_begins_again(self, tmp_path: Path) -> None:
        """A run stopped before the first checkpoint may start anew. Its files are kept; another run is refused."""
        run_dir, cfg, notes = left_by_a_run(tmp_path), sft(tmp_path, trackers=()), []
        before = (run_dir / "metrics.jsonl").read_bytes()
        told, on_rank_0 = SimpleNamespace(any=lambda warned: True), SimpleNamespace(note=notes.append)
        with pytest.raises(SystemExit, match="75"):
            Phases(told, run_dir, on_rank_0, None, 60.0, None).exit_if_preempted(0, lambda deadline_s: 0)
        assert notes == ["stopping after step 0 on a signal: no step is saved"]
        assert json.loads((run_dir / "preempted").read_text())["step"] is None
        refuse_existing(cfg)
        with contextlib.ExitStack() as stack:
            open_run_dir(cfg, run_dir, stack)
        assert (run_dir / "earlier_1/metrics.jsonl").read_bytes() == before
        (run_dir / "metrics.jsonl").write_bytes(before)
        with pytest.raises(RunExists):
            refuse_existing(cfg)

    def test_the_launcher_writes_it_down_where_no_rank_has_come_to_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cfg = sft(tmp_path, trackers=(), nproc=1)
        (tmp_path / "one").mkdir()
        monkeypatch.setattr("mrl.launcher.launch", lambda *args, **more: 75)
        assert world.start_local(cfg, ["mrl", "train", "config.yaml"], None) == 75
        left_by_a_run(tmp_path)
        refuse_existing(cfg)

    def test_it_is_said_before_anything_starts(self, tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
        left_by_a_run(tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        monkeypatch.setattr("mrl.config.loader.load", lambda *args, **more: sft(tmp_path))
        monkeypatch.setattr("mrl.preflight.checks.RUN_CHECKS", (check_directory,))
        monkeypatch.setattr("mrl.preflight.memory.check_memory", lambda *args: ())  # there is no model to check
        assert main(["train", "config.yaml"]) == 1
        said = capfd.readouterr().err
        assert said.count("\n") == 1 and "run.existing=move_aside" in said
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


class TestPrivate:
    @pytest.fixture
    def cfg(self, tmp_path: Path) -> RLConfig:
        servers = {"scores": {"url": URL}}
        file = write_config(tmp_path, Path("model"), reward={"function": None, "manager": "remote", "servers": servers})
        content = yaml.safe_load(file.read_text())
        del content["run"]["trackers"]  # YAML has a list where the configuration has a tuple
        return RLConfig.model_validate(content)

    def test_passwords_are_not_written_down(self, cfg: RLConfig) -> None:
        for text in (dump_resolved(cfg), json.dumps(resume_checks.snapshot(cfg)), redact(f"POST {URL}: refused")):
            assert "hunter2" not in text and "scores.example/v1" in text and "n=3" in text

    def test_another_password_is_no_change_of_the_run(self, cfg: RLConfig) -> None:
        stored = json.loads(json.dumps(resume_checks.snapshot(cfg)))

        def changes(url: str) -> list[str]:
            servers = {"scores": cfg.reward.servers["scores"].model_copy(update={"url": url})}
            reward = cfg.reward.model_copy(update={"servers": servers})
            return [change.key for change in resume_checks.compare(stored, cfg.model_copy(update={"reward": reward}))]

        assert changes(URL.replace("hunter2", "correct-horse")) == []
        assert changes(URL.replace("example", "invalid")) == ["reward.servers.scores.url"]

    def test_a_password_may_hold_what_ends_it(self) -> None:
        assert redact("GET http://ann:hunter@2@host/v1?n=3") == "GET http://***@host/v1?n=3"

    @pytest.mark.parametrize("text", ["http://host:80/a@b", "see a@b.org", "https://host/?step=3", "12:30 key=value"])
    def test_what_is_no_password_stays(self, text: str) -> None:
        assert redact(text) == text

    def test_errors_and_logs_have_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (log,) = open_logs(tmp_path, 1, ["mrl", "train", f"reward.servers.scores.url={URL}"])
        monkeypatch.setenv("MRL_FAILURE_FILE", str(log.failure_file))
        note(ConnectionError(f"no answer from {URL}"))
        with Terminal(log.path) as terminal:
            found = collect_failures([log], terminal)[0]
        assert "hunter2" not in found.message + found.traceback + log.path.read_text()
        assert "scores.example" in found.message

    @pytest.mark.parametrize("umask", [0o000, 0o022])
    def test_nobody_else_can_look_into_it(self, tmp_path: Path, umask: int) -> None:
        before = os.umask(umask)
        try:
            RunDir.open(sft(tmp_path / "runs")).close()
            with lock_log_dir(tmp_path / "runs/launched/logs"):
                pass
        finally:
            os.umask(before)
        for name in ("one", "launched"):
            assert stat.S_IMODE((tmp_path / "runs" / name).stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("root", "name", "message"),
    [
        ("runs", "two\nlines", "line break or another control character"),
        ("runs", "nul\0", "line break or another control character"),
        ("runs", "n" * 300, "300 bytes long; the maximum"),
        ("ru\0ns", "one", "line break or another control character"),
        ("r" * 300, "one", "File name too long"),
        ("/dev/null/runs", "one", "/dev/null is not a directory"),
        ("/proc/self/runs", "one", "is not writable"),
    ],
)
def test_a_place_where_no_run_can_be_is_found_at_once(root: str, name: str, message: str) -> None:
    if root.startswith("/proc") and os.access("/proc/self", os.W_OK):
        pytest.skip("/proc says that it can be written to here")
    problems = check(sft(root, name), {"actor": None}, Machine(1, 1))
    assert [problem for problem in problems if message in problem.message], problems


def report_of(folder: Path, name: str, content: bytes, capfd: pytest.CaptureFixture[str]) -> str:
    run_dir = left_by_a_run(folder)
    (run_dir / "rollouts/step_1.jsonl").rename(run_dir / "rollouts/validation_step_0.jsonl")
    (run_dir / name).write_bytes(content)
    assert main(["report", str(run_dir)]) == 1
    return capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.yaml", b"run: [", "config.yaml: not valid YAML of a run"),
        ("config.yaml", b"a: 2020-13-45", "config.yaml: not valid YAML of a run"),
        ("config.yaml", b"\xff\xfe\x00", "config.yaml: not valid YAML of a run"),
        ("config.yaml", b"- 1\n", "config.yaml: expected a mapping of sections"),
        ("config.yaml", b"run: 3\n", "config.yaml: expected a mapping of sections"),
        ("metrics.jsonl", b'{"step": 1}\n{"step": 2, "re\n', "metrics.jsonl:2: not JSON"),
        ("metrics.jsonl", b"[1]\n", "metrics.jsonl:1: expected a JSON object"),
        ("metrics.jsonl", b'{"loss": 1}\n', "metrics.jsonl: a row is not a step with numeric metrics"),
        ("metrics.jsonl", b'{"step": null}\n', "metrics.jsonl: a row is not a step with numeric metrics"),
        (
            "metrics.jsonl",
            b'{"step": 1, "loss": ' + b"9" * 400 + b"}\n",
            "metrics.jsonl: a row is not a step with numeric metrics",
        ),
        ("metrics.jsonl", b'{"step": 1, "loss": "low"}\n', "metrics.jsonl: a row is not a step with numeric metrics"),
        (
            "rollouts/validation_step_0.jsonl",
            b'{"index": 1, "prompt": "p"}\n',
            "sample 1 has no valid response and no valid row",
        ),
    ],
)
def test_a_report_of_broken_files_is_one_line(
    name: str, content: bytes, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = report_of(tmp_path, name, content, capfd)
    assert message in said and said.count("\n") == 1, said


def test_the_folder_of_the_runs_is_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert capfd.readouterr().err == f"{tmp_path} contains no run: expected a run directory, such as runs/NAME\n"
    assert not list(tmp_path.iterdir())


def test_words_that_are_no_text_and_no_place_for_temporary_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", "config.yaml", "run.name=\udcff"]) == 2
    assert capfd.readouterr().err == "mrl: an argument is not UTF-8: b'run.name=\\xff'\n"
    monkeypatch.setattr("mrl.config.loader.load", lambda *args, **more: sft(tmp_path))
    monkeypatch.setattr("mrl.preflight.checks.RUN_CHECKS", ())
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    assert main(["train", "config.yaml"]) == 1
    assert capfd.readouterr().err.startswith(f"TMPDIR is '{tmp_path / 'missing'}', in which no files can be created")
