"""A full disk ends only what cannot work without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.core import StepStats
from mrl.observe import (
    Recorder,
    WriteFailed,
    read_metrics,
    write_report,
)
from mrl.observe.tensorboard import TensorboardWriter
from mrl.terminal import Terminal
from tests.helpers.full_disk import full_disk
from tests.unit.observe.test_run_dir import left_by_a_run, sft

ROOT = Path(__file__).parents[3]

FILLED = 1 << 16  # size of a file that cannot grow any more; the tests print less than that


class TestFullDisk:
    def test_the_launcher_goes_on_without_its_log(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "rank_0.log").write_bytes(bytes(FILLED))
        with full_disk(FILLED + 100), Terminal(tmp_path / "rank_0.log") as terminal:
            for number in range(3):
                os.write(terminal.for_rank, b"%d" % number + b"x" * 80 + b"\n")
                terminal.pump(1.0)
        said = capfd.readouterr()
        assert [line[0] for line in said.out.splitlines()] == ["0", "1", "2"]
        assert said.err.count("\n") == 1 and "rank_0.log cannot be written any more (File too large)" in said.err

    def test_metrics_end_the_run_in_one_sentence_or_are_missed(self, tmp_path: Path) -> None:
        for on_error in ("stop", "warn"):
            (tmp_path / on_error).mkdir()
            (tmp_path / on_error / "metrics.jsonl").write_bytes(b"\n" * FILLED)
            with Recorder(tmp_path / on_error, 3, live=False, on_error=on_error) as recorder:
                recorder.log(StepStats(1, {"loss": 1.0}))
                with full_disk((tmp_path / on_error / "metrics.jsonl").stat().st_size + 10):
                    if on_error == "warn":
                        recorder.log(StepStats(2, {"loss": 2.0}))
                    else:
                        with pytest.raises(
                            WriteFailed, match="step's metrics cannot be written: File too large .*warn"
                        ):
                            recorder.log(StepStats(2, {"loss": 2.0}))
                recorder.log(StepStats(3, {"loss": 3.0}))
            assert [row["step"] for row in read_metrics(tmp_path / on_error)] == [1, 3], "half a row was left"

    def test_tensorboard_misses_the_steps_that_have_no_room(self, tmp_path: Path) -> None:
        events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        writer = TensorboardWriter(sft(tmp_path), tmp_path)
        for step, room in enumerate((10, None, 400, None)):
            stats = StepStats(step, {"loss": 1.0, "x" * 400: 2.0})
            if room is None:
                writer.write(stats)
                continue
            with full_disk(room), pytest.raises(OSError, match="File too large"):
                writer.write(stats)
        loaded = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        assert [event.step for event in loaded.Scalars("loss")] == [1, 3]

    def test_nothing_half_written_is_left(self, tmp_path: Path) -> None:
        left_by_a_run(tmp_path)
        with full_disk(100), pytest.raises(OSError):
            write_report(tmp_path / "one")
        assert not list((tmp_path / "one").glob("*.tmp")) + list((tmp_path / "one").glob(".*"))

    @pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="mounts a small file system: root only")
    def test_an_error_finds_room_on_a_disk_that_is_really_full(self, tmp_path: Path) -> None:
        """An error is still written when the disk is full, because the launcher reserves space for it."""
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True).returncode:
            pytest.skip("mount is not allowed here")
        try:
            code = """
import os, sys
from pathlib import Path
from mrl import failure
from mrl.launcher.logs import open_logs, collect_failures
from mrl.terminal import Terminal
logs = open_logs(Path("."), 1, ["x"])
try:
    with open("filler", "wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096: pass
except OSError as error:
    os.environ["MRL_FAILURE_FILE"] = "rank_0.failure"
    failure.note(error)
with Terminal(logs[0].path) as terminal:
    print(collect_failures(logs, terminal)[0].message)
"""
            done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                                  env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
            assert done.returncode == 0 and "No space left on device" in done.stdout, done.stderr
        finally:
            subprocess.run(["umount", tmp_path], check=True)
