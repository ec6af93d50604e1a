"""Profiles the steps of `run.profile` with torch's profiler; other steps cost nothing.

RUN_DIR/profile/step_N_rank_R.json.gz is a trace for chrome://tracing or Perfetto, step_N_rank_R.txt lists the ten
largest operations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mrl import platform
from mrl.config.schema import RunConfig
from mrl.observe import Recorder, SilentRecorder
from mrl.parallel import rank

LARGEST, NAMED = 10, 3


@contextmanager
def profiled(cfg: RunConfig, step: int, run_dir: Path, recorder: Recorder | SilentRecorder) -> Iterator[None]:
    """Profiles step number `step`, counted from 1. A step that fails writes nothing."""
    if cfg.profile is None or step not in cfg.profile.steps or rank() not in cfg.profile.ranks:
        yield
        return
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
    """Returns the largest events, and the microseconds of all events."""
    ordered = sorted(events, key=lambda event: -_self_us(event, on_gpu))
    return ordered[:LARGEST], sum(_self_us(event, on_gpu) for event in ordered) or 1.0


def _self_us(event: Any, on_gpu: bool) -> float:
    own: float = event.self_device_time_total if on_gpu else event.self_cpu_time_total
    return own
