"""Engines that release and resume memory: the requests they get, what a restart resets, and refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mrl.config.schema import RolloutConfig
from mrl.core import SamplingParams
from mrl.inference import check, protocol
from mrl.inference.access import OPEN
from mrl.inference.engine import Engine
from mrl.inference.engine_pool import EnginePool
from mrl.inference.errors import EngineError, EngineStartError, RolloutError
from mrl.inference.server import Server
from mrl.inference.server_info import UNCHECKED

ALL, CACHE = protocol.RELEASED_PARTS["all"], protocol.RELEASED_PARTS["cache"]
RELEASE, RESUME = protocol.RELEASE_MEMORY.name, protocol.RESUME_MEMORY.name


class Process:
    """An engine that ends as SGLang does if it must release what it has released, resume what it has, or release memory
    while requests run.

    asked: the requests over all its restarts; failing: an endpoint at which it dies, hangs or refuses, once
    """

    name, log, is_gone = "engine", "engine.log", False

    def __init__(self, url: str) -> None:
        self.url, self.code = url, None
        self.released: set[str] = set()
        self.asked: list[str] = []
        self.failing: tuple[str, str] | None = None
        self.running = 0  # how many checks of the queue still find requests

    def exit_code(self) -> int | None:
        return self.code

    def restart(self) -> None:
        self.code = None
        self.released.clear()
        self.asked.append("start")

    def is_ready(self, timeout_s: float) -> bool:
        return True

    def wait_ready(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass

    def exit_report(self) -> str:
        return "its last words"


class Client:
    """The client of a Process."""

    def __init__(self, process: Process, timeout_s: float) -> None:
        self.process, self.timeout_s = process, timeout_s

    def close(self) -> None:
        pass

    def flush_when_idle(self, timeout_s: float) -> None:
        if self.process.running:
            raise EngineError(self.process.url, "flush_cache", 400, "requests are running")

    def release_memory(self, parts: list[str]) -> None:
        self._serve(RELEASE, parts)
        if self.process.running or self.process.released & {*parts}:
            self._die(RELEASE)
        self.process.released |= {*parts}

    def resume_memory(self, parts: list[str]) -> None:
        self._serve(RESUME, parts)
        if not self.process.released >= {*parts}:
            self._die(RESUME)
        self.process.released -= {*parts}

    def _serve(self, name: str, parts: list[str]) -> None:
        process = self.process
        process.asked.append(f"{name.partition('_')[0]} {' '.join(parts)}")
        if process.failing and process.failing[0] == name:
            how, process.failing = process.failing[1], None
            if how == "dies":
                self._die(name)
            status = 404 if how == "refuses" else None
            raise EngineError(process.url, name, status, "Not Found" if status else "ReadTimeout after 9 s")

    def _die(self, name: str) -> None:
        self.process.code = 137
        raise EngineError(self.process.url, name, None, "ReadError")


class Trainer:
    """Two engines that mrl started, or given ones, with the run's handling of restarted engines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ours: bool = True, restarts: int = 3) -> None:
        self.processes = [Process(f"http://{i}") for i in range(2)]
        servers = [Server(p.url, p if ours else None) for p in self.processes]  # type: ignore[arg-type]
        pool = EnginePool(
            servers,
            OPEN,
            lambda url: (UNCHECKED, ()),
            startup_timeout_s=9.0,
            max_restarts=restarts,
            memory_timeout_s=9.0,
        )
        monkeypatch.setattr("mrl.inference.server.DEATH_WAIT_S", 0.0)
        monkeypatch.setattr("mrl.inference.engine_pool.DEATH_WAIT_S", 0.0)
        monkeypatch.setattr(pool, "client", lambda url, s: Client(self.processes[int(url[-1])], s))
        self.engine = Engine(pool, vocab_size=9, concurrent_requests=1, request_timeout_s=9.0)
        self.weights_to: list[str] = []
        self.engine.pool.restarts.allow(lambda note: None, self.weights_to.append)

    @property
    def asked(self) -> list[list[str]]:
        """Returns the requests since the last call, by engine."""
        found = [process.asked[:] for process in self.processes]
        for process in self.processes:
            process.asked.clear()
        return found


def test_each_part_is_given_up_and_taken_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Trainer(monkeypatch)
    run.engine.release_memory(CACHE)
    run.engine.release_memory(CACHE)
    run.engine.release_memory(ALL)
    assert run.asked == [["release kv_cache cuda_graph", "release weights"]] * 2
    run.engine.resume_memory(["weights"])
    run.engine.resume_memory(["weights"])
    run.engine.resume_memory(CACHE)
    run.engine.resume_memory(ALL)
    assert run.asked == [["resume weights", "resume kv_cache cuda_graph"]] * 2


def test_an_engine_that_sleeps_samples_nothing_and_takes_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Trainer(monkeypatch).engine

    def refusal() -> str:
        with pytest.raises(RolloutError) as caught:
            engine.generate([], SamplingParams())
        return str(caught.value)

    engine.release_memory(ALL)
    assert refusal() == "engine http://0 has given up its weights, kv_cache, cuda_graph: take it back first"
    with pytest.raises(EngineError, match="http://1: .*weights is released; restore it before the weight sync"):
        engine.check_sync("http://1")
    engine.resume_memory(["weights"])
    engine.check_sync("http://1")
    engine.resume_memory(CACHE)
    assert refusal() == "engine http://0 lacks its weights: sync them first" and engine.lacks_weights
    engine.has_synced("3")
    assert engine.generate([], SamplingParams()) == [] and not engine.lacks_weights
    engine.release_memory(CACHE)
    engine.resume_memory(CACHE)
    assert engine.generate([], SamplingParams()) == [], "its weights were there all the time"


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_one_that_is_lost_over_it_is_started_again_and_brought_there(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    run = Trainer(monkeypatch)
    first, second = run.processes
    first.failing = (RELEASE, how)
    run.engine.release_memory(CACHE)
    cache = "release kv_cache cuda_graph"
    assert run.asked == [[cache, "start", cache], [cache]] and run.engine.lacks_weights
    run.engine.has_synced("1")
    second.failing = (RESUME, how)
    run.engine.resume_memory(CACHE)
    assert run.asked == [["resume kv_cache cuda_graph"], ["resume kv_cache cuda_graph", "start"]]
    assert run.engine.lacks_weights and run.engine.pool.restarts.made == 2
    with pytest.raises(RolloutError, match="http://1 lacks its weights"):
        run.engine.generate([], SamplingParams())
    assert run.weights_to == [], "the trainer's are not at hand"


def test_one_that_is_lost_without_its_weights_waits_for_the_push_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Trainer(monkeypatch)
    first, second = run.processes
    first.failing = (RELEASE, "dies")
    run.engine.release_memory(ALL)
    assert first.released == second.released == {*ALL}
    second.failing = (RESUME, "dies")
    run.engine.resume_memory(["weights"])
    assert first.released == second.released == {*CACHE}, "the trainer has that memory"
    first.code = 137
    assert run.engine.pool.revive(RuntimeError("the push failed"))
    assert first.released == {*CACHE}
    run.engine.has_synced("1")
    run.engine.resume_memory(CACHE)
    assert run.engine.generate([], SamplingParams()) == []


@pytest.mark.parametrize(
    ("how", "ours", "restarts", "message"),
    [
        ("refuses", True, 3, "engine http://0: /release_memory_occupation: HTTP 404: Not Found"),
        ("hangs", False, 3, "engine http://0: /release_memory_occupation: no answer: ReadTimeout after 9 s"),
        ("dies", True, 0, "its last words"),
    ],
)
def test_what_cannot_be_mended_is_one_error(
    monkeypatch: pytest.MonkeyPatch, how: str, ours: bool, restarts: int, message: str
) -> None:
    run = Trainer(monkeypatch, ours, restarts)
    run.processes[0].failing = (RELEASE, how)
    with pytest.raises(RolloutError) as caught:
        run.engine.release_memory(CACHE)
    assert message in str(caught.value)
    run.engine.resume_memory(CACHE)
    assert run.asked[1] == ["release kv_cache cuda_graph", "resume kv_cache cuda_graph"], "each is known by itself"


def test_a_busy_engine_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Trainer(monkeypatch, ours=False)
    run.processes[1].running = 1
    with pytest.raises(RolloutError, match="http://1: .*not asked: requests still run after 9 s, and only an idle"):
        run.engine.release_memory(CACHE)
    assert run.asked[1] == []


def test_an_engine_must_be_able_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(release: str, **info: Any) -> list[str]:
        cfg: Any = SimpleNamespace(release=release, deterministic=False)
        return list(check._notes("http://0", protocol.read_server_info(info), cfg))

    assert notes("none") == notes("all", enable_memory_saver=True) == []
    assert "serves on a CPU" in notes("cache", enable_memory_saver=False, device="cpu")[0]
    for info in ({}, {"enable_memory_saver": False, "device": "cuda"}):
        with pytest.raises(EngineStartError, match="rollout.release = cache asks .* --enable-memory-saver"):
            notes("cache", **info)
    assert RolloutConfig().release == "none"
