"""Profiler ranges, captures and memory snapshots around steps, without a GPU: the calls to CUDA's tools."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl import platform
from mrl.config.schema import RunConfig
from mrl.launcher import LaunchError, nsys_command
from mrl.observe import SilentRecorder
from mrl.platform import profiling
from mrl.trainers.shared import profile
from mrl.trainers.shared.profile import StepProfiler


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the calls of the tools, in order."""
    made: list[str] = []

    @contextmanager
    def noted(name: str = "capture") -> Iterator[None]:
        made.append(f"{name} begins")
        yield
        made.append(f"{name} ends")

    monkeypatch.setattr(profile, "rank", lambda: 0)
    monkeypatch.setattr(platform, "nvtx_range", noted)
    monkeypatch.setattr(platform, "nsys_capture", noted)
    return made


def steps(profiler: StepProfiler, count: int) -> None:
    for number in range(1, count + 1):
        with profiler.step(number):
            for name in ("rollout", "update"):
                with profiler.phase(name):
                    torch.ones(8).sum()


def profiler(folder: Path, **run: Any) -> StepProfiler:
    return StepProfiler(RunConfig.model_validate({"name": "run", **run}), folder, SilentRecorder())


def test_nsys_sees_the_phases_of_the_steps_that_were_asked_for(asked: list[str], tmp_path: Path) -> None:
    steps(profiler(tmp_path, profile={"tool": "nsys", "steps": (2,)}), 3)
    phases = [f"{name} {end}" for name in ("rollout", "update") for end in ("begins", "ends")]
    assert asked == ["capture begins", *phases, "capture ends"]


def test_other_ranks_and_runs_ask_for_nothing(asked: list[str], tmp_path: Path) -> None:
    steps(profiler(tmp_path), 2)
    steps(profiler(tmp_path, profile={"tool": "nsys", "steps": (1,), "ranks": (1,)}), 2)
    assert asked == [] and not list(tmp_path.iterdir())


def test_torch_s_trace_names_the_phases(asked: list[str], tmp_path: Path) -> None:
    steps(profiler(tmp_path, profile={"steps": (1,)}), 2)
    trace, table = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert (trace, table) == ("step_1_rank_0.json.gz", "step_1_rank_0.txt") and asked == []
    operations = (tmp_path / "profile" / table).read_text()
    assert "aten::sum" in operations and "update" not in operations, "a range is no operation"
    text = gzip.decompress((tmp_path / "profile" / trace).read_bytes()).decode()
    assert '"rollout"' in text and '"update"' in text


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Imitates torch's GPU allocator. Returns its settings, and the function that it calls when memory runs out."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(profile, "rank", lambda: 0)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: seen.update(given))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda file: Path(file).write_text("snapshot"))
    observe = lambda observer: seen.update(observer=observer)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observe, raising=False)
    return seen


def test_snapshots_are_written_after_steps_and_when_memory_runs_out(
    allocator: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = profiler(tmp_path, memory_history={"steps": (2,), "max_entries": 70})
    assert allocator["max_entries"] == 70
    steps(found, 3)
    folder = tmp_path / "profile"
    assert [path.name for path in folder.iterdir()] == ["memory_step_2_rank_0.pickle"]
    allocator["observer"](0, 512, 1024, 1024)
    assert (folder / "memory_out_of_memory_rank_0.pickle").read_text() == "snapshot"
    assert f"out of GPU memory: allocations are in {folder}" in capsys.readouterr().err


def test_a_history_may_be_of_steps_alone_or_of_another_rank(allocator: dict[str, Any], tmp_path: Path) -> None:
    profiler(tmp_path, memory_history={"steps": (1,), "ranks": (1,)})
    assert allocator == {}
    profiler(tmp_path, memory_history={"steps": (1,), "on_out_of_memory": False})
    assert allocator == {"max_entries": 100000}


def test_ranges_cost_nothing_without_cuda() -> None:
    with profiling.nsys_capture(), profiling.nvtx_range("update"):
        pass


def test_a_machine_without_nsys_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="nsys is not on PATH: install NVIDIA Nsight Systems"):
        nsys_command(tmp_path, on_gpu=True)
    (tmp_path / "nsys").write_text("#!/bin/sh\n")
    (tmp_path / "nsys").chmod(0o755)
    words = nsys_command(tmp_path, on_gpu=True)
    assert words[:2] == ["nsys", "profile"] and words[-1] == f"--output={tmp_path}/nsys_rank_%q{{RANK}}"
    assert "--capture-range=cudaProfilerApi" in words and "--capture-range-end=repeat" in words
    assert not any(word.startswith("--capture") for word in nsys_command(tmp_path, on_gpu=False))
