"""A process and its GPU, with `torch.cuda` imitated."""

from __future__ import annotations

import os
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl import platform
from mrl.checkpoint import saver
from mrl.config.schema import CheckpointConfig
from mrl.platform import determinism, speed
from mrl.resilience.stragglers import StragglerDetector
from mrl.weights.sync.transports.background import InBackground


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns gpus(n), which makes n GPUs visible."""

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
    """The device of a process. If each sees one GPU (Slurm's --gpus-per-task=1), it is the first one for all ranks."""
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
    """Threads that use tensors select the device first. A new thread's current GPU is number 0, so the writer of a
    synchronous checkpoint would copy from another GPU without waiting for its stream."""
    done: list[tuple[str, str]] = []

    def note(what: str) -> Any:
        return lambda *args, **kwargs: done.append((threading.current_thread().name, what))

    monkeypatch.setattr(platform, "use_device", note("device"))
    monkeypatch.setattr(saver.directory, "prune", note("prune"))
    monkeypatch.setattr(saver, "CheckpointAgreement", lambda group: SimpleNamespace(on_main=lambda what, do: do()))
    staged: Any = SimpleNamespace(final=SimpleNamespace(parent="checkpoints"), write=note("write"))
    writing = saver._Writing(staged, None, CheckpointConfig(), None)  # type: ignore[arg-type]
    writing.thread.join()
    assert writing.answer() == (True, None)
    assert done == [("checkpoint-writer", what) for what in ("device", "write", "prune")]

    done.clear()
    InBackground(note("call")).result(10.0, "the call")
    assert [what for _, what in done] == ["device", "call"]


class Event:
    """A CUDA event on a simulated stream: it is complete when the device reaches it."""

    queued, reached = 0.0, 0.0  # seconds of work: submitted to the device so far, and done

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.queued

    def query(self) -> bool:
        return self.at <= Event.reached

    def elapsed_time(self, other: Event) -> float:
        assert other.query(), "asked before the device was there: it would have been waited for"
        return (other.at - self.at) * 1e3


@pytest.fixture
def stream(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns stream(timers, name, seconds), which runs Megatron's schedule around a pass of that length."""
    gpus(1)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: pytest.fail("the host waited"))
    monkeypatch.setattr(speed, "_PASSES", {name: speed.PassTimer() for name in speed._PASSES})
    monkeypatch.setattr(Event, "queued", 0.0)
    monkeypatch.setattr(Event, "reached", 0.0)

    def run(timers: Any, name: str, seconds: float) -> None:
        timers(name, log_level=2).start()
        Event.queued += seconds
        timers(name).stop()

    return run


def test_on_gpus_the_time_of_passes_is_what_a_rank_has_worked(stream: Any) -> None:
    """On GPUs a rank's work is the time of its passes. The host of a fast rank spins while it waits for others, so its
    processor time is no measure."""
    timers = platform.pass_timers()
    stream(timers, "forward-compute", 3.0)
    stream(timers, "forward-recv", 9.0)  # receiving from another stage counts as waiting
    stream(timers, "backward-compute", 4.0)
    assert platform.busy_seconds() == 0.0, "nothing is done yet"
    Event.reached = 12.0
    assert platform.busy_seconds() == 3.0, "the backward pass is not over, and nobody waits for it"
    Event.reached = 16.0
    assert platform.busy_seconds() == 7.0
    timers("all-grads-sync", log_level=1).start(barrier=True)


def test_a_slow_rank_is_told_by_the_time_of_its_passes(stream: Any) -> None:
    def ranks(row: Any) -> list[list[float]]:
        own = list(row)
        return [own, [own[0], own[1], own[2] * 9, *own[3:]], own]  # the second rank's passes take nine times as long

    stragglers = StragglerDetector(ranks, peers=0, every_steps=1, ratio=2.0)
    with stragglers.timed("update"):
        stream(platform.pass_timers(), "forward-compute", 1.0)
        Event.reached = Event.queued
    report = _without_the_probe(stragglers)
    assert report.seconds["update"] == [1.0, 9.0, 1.0] and report.metrics()["straggler/slowest_rank"] == 1.0


def _without_the_probe(stragglers: StragglerDetector) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "probe_seconds", lambda: 0.001)
        return stragglers.end_of_step()


def test_megatron_calls_its_timers_by_these_names() -> None:
    (core,) = (Path(place) for place in find_spec("megatron").submodule_search_locations)  # type: ignore[union-attr]
    text = (core / "core" / "pipeline_parallel" / "schedules.py").read_text()
    for name in speed._PASSES:
        assert f"config.timers('{name}', log_level=2).start()" in text and f"config.timers('{name}').stop()" in text


def test_on_a_cpu_megatron_times_nothing(gpus: Any) -> None:
    gpus(0)
    assert platform.pass_timers() is None


def test_deterministic_is_told_to_all_that_add_in_an_order_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*determinism.CHOSEN, *determinism.REQUIRED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    assert not platform.is_deterministic()
    try:
        platform.enable_determinism()
        assert platform.is_deterministic()
        assert os.environ["NCCL_ALGO"] == "Tree", "what a user has chosen fixes the order too"
        assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
