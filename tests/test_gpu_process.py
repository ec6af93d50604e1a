"""What a process does with its GPU, with `torch.cuda` imitated."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl import platform
from mrl.checkpoint import saver
from mrl.config.schema import CheckpointConfig
from mrl.resilience.stragglers import DEVICE, TIMED, Report, judged_here
from mrl.weights.sync.transports.background import InBackground


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """gpus(n) makes n of them visible."""

    def make(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return make


@pytest.mark.parametrize(
    ("count", "local_rank", "device"),
    [(8, "3", "cuda:3"), (2, "0", "cuda:0"), (1, "0", "cuda:0"), (1, "5", "cuda:0"), (0, "5", "cpu")],
)
def test_the_gpu_of_a_process(
    count: int, local_rank: str, device: str, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one visible GPU each (Slurm's --gpus-per-task=1) it is the first, whatever the rank on the node."""
    gpus(count)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert platform.device() == torch.device(device)


@pytest.mark.parametrize(("count", "set_to"), [(8, ["cuda:3"]), (0, [])])
def test_a_thread_takes_its_process_device(
    count: int, set_to: list[str], gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(count)
    monkeypatch.setenv("LOCAL_RANK", "3")
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    platform.use_device()
    assert chosen == set_to


def test_threads_that_meet_tensors_take_the_device_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's current GPU is number 0: the writer of a synchronous checkpoint would copy from another one
    without waiting for its stream."""
    done: list[tuple[str, str]] = []

    def note(what: str) -> Any:
        return lambda *args, **kwargs: done.append((threading.current_thread().name, what))

    monkeypatch.setattr(platform, "use_device", note("device"))
    monkeypatch.setattr(saver.directory, "prune", note("prune"))
    monkeypatch.setattr(saver, "CheckpointAgreement", lambda group: SimpleNamespace(on_main=lambda what, do: do()))
    staged: Any = SimpleNamespace(final=SimpleNamespace(parent="checkpoints"), write=note("write"))
    writing = saver._Writing(staged, None, CheckpointConfig())  # type: ignore[arg-type]
    writing.thread.join()
    assert writing.answer() == (True, None)
    assert done == [("checkpoint-writer", what) for what in ("device", "write", "prune")]

    done.clear()
    InBackground(note("call")).result(10.0, "the call")
    assert [what for _, what in done] == ["device", "call"]


def test_on_gpus_only_the_fixed_work_tells_a_slow_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts of a fast rank's GPU spin while it waits for the others: their processor time is no work."""
    seconds = {name: [1.0, 9.0] for name in TIMED} | {DEVICE: [0.01, 0.01]}
    for where, slowdown in (("cpu", 9.0), ("cuda:0", 1.0)):
        monkeypatch.setattr(platform, "device", lambda where=where: torch.device(where))
        report = Report([0, 0], seconds, 10, 2.0, judged_here())
        assert report.metrics()["straggler/slowdown"] == slowdown
