"""Profiles the steps of `run.profile`, and writes snapshots of `run.memory_history`; other steps cost nothing.

RUN_DIR/profile/step_N_rank_R.json.gz is a trace for chrome://tracing or Perfetto, step_N_rank_R.txt lists the ten
largest operations, memory_*_rank_R.pickle are snapshots of the GPU's memory. nsys writes its reports itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mrl import platform
from mrl.config.schema import RunConfig
from mrl.observe import Recorder, SilentRecorder
from mrl.parallel import rank

LARGEST, NAMED = 10, 3


class StepProfiler:
    """Profiler of this rank's steps. It records the history of the GPU's memory from its construction on."""

    def __init__(self, cfg: RunConfig, run_dir: Path, recorder: Recorder | SilentRecorder) -> None:
        self._profile = cfg.profile if cfg.profile is not None and rank() in cfg.profile.ranks else None
        history = cfg.memory_history
        self._history = history if history is not None and rank() in history.ranks else None
        self._run_dir, self._recorder = run_dir, recorder
        self._range: Callable[[str], AbstractContextManager[object]] | None = None
        if self._history is not None:
            observer = self._out_of_memory if self._history.on_out_of_memory else None
            platform.record_memory_history(self._history.max_entries, observer)

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Returns a context that names a part of a profiled step."""
        return nullcontext() if self._range is None else self._range(name)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profiles a step, counted from 1, if it is one of those. A step that fails writes nothing."""
        with self._tool(number):
            yield
        if self._history is not None and number in self._history.steps:
            self._snapshot(f"step_{number}")

    def _tool(self, number: int) -> AbstractContextManager[object]:
        if self._profile is None or number not in self._profile.steps:
            return nullcontext()
        return self._nsys() if self._profile.tool == "nsys" else self._torch(number)

    @contextmanager
    def _nsys(self) -> Iterator[None]:
        self._range = platform.nvtx_range
        with platform.nsys_capture():
            yield
        self._range = None

    @contextmanager
    def _torch(self, number: int) -> Iterator[None]:
        import torch.profiler

        self._range = torch.profiler.record_function
        with profiled(number, self._run_dir, self._recorder):
            yield
        self._range = None

    def _out_of_memory(self) -> None:
        file = self._snapshot("out_of_memory")
        print(f"out of GPU memory: allocations are in {file}", file=sys.stderr, flush=True)

    def _snapshot(self, when: str) -> Path:
        folder = self._run_dir / "profile"
        file = folder / f"memory_{when}_rank_{rank()}.pickle"

        def write() -> None:
            folder.mkdir(exist_ok=True)
            platform.dump_memory_snapshot(file)

        self._recorder.write_guarded("the memory snapshot", write)
        return file


@contextmanager
def profiled(step: int, run_dir: Path, recorder: Recorder | SilentRecorder) -> Iterator[None]:
    """Profiles step number `step` with torch's profiler."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences its messages on stderr
    import torch.profiler

    on_gpu = platform.backend() == "nccl"
    kinds = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * on_gpu]
    profiler = torch.profiler.profile(activities=kinds, acc_events=True)
    profiler.start()
    yield
    platform.synchronize()
    profiler.stop()
    folder, name = run_dir / "profile", f"step_{step}_rank_{rank()}"

    def write() -> None:
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
        (folder / f"{name}.txt").write_text(table(largest, total, on_gpu))

    largest, total = _largest(profiler.key_averages(), on_gpu)
    recorder.write_guarded("the profile", write)
    shares = ", ".join(f"{event.key} {_self_us(event, on_gpu) / total:.0%}" for event in largest[:NAMED])
    recorder.note(f"profile of step {step}: {folder / name}.json.gz and .txt; largest: {shares}")


def table(largest: list[Any], total: float, on_gpu: bool) -> str:
    """Returns lines of text: the share of self time of each operation.

    total: microseconds of all operations
    """
    where = "GPU" if on_gpu else "CPU"
    what = f"operation, by self time on the {where} ({total / 1000:,.1f} ms in all operations)"
    lines = [f"{'share':>6} {'ms':>12} {'calls':>9}  {what}"]
    for event in largest:
        own = _self_us(event, on_gpu)
        lines.append(f"{own / total:6.1%} {own / 1000:12.2f} {event.count:9}  {event.key}")
    return "\n".join(lines) + "\n"


def _largest(events: Any, on_gpu: bool) -> tuple[list[Any], float]:
    """Returns the largest operations, and the microseconds of all; ranges of phases are none."""
    operations = [event for event in events if not event.is_user_annotation]
    ordered = sorted(operations, key=lambda event: -_self_us(event, on_gpu))
    return ordered[:LARGEST], sum(_self_us(event, on_gpu) for event in ordered) or 1.0


def _self_us(event: Any, on_gpu: bool) -> float:
    own: float = event.self_device_time_total if on_gpu else event.self_cpu_time_total
    return own
