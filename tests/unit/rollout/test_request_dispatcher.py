"""Dispatch of requests over engines that hang, break connections, or receive weights: by stubs in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from mrl.core import Prompt, Request, Sample, SamplingParams
from mrl.rollout import request_dispatcher
from mrl.rollout.access import Access
from mrl.rollout.engine import Engine
from mrl.rollout.engine_pool import Checked, EnginePool
from mrl.rollout.errors import RolloutError
from mrl.rollout.request_dispatcher import by_prompt
from mrl.rollout.server import Server
from mrl.rollout.serving import Server as HttpServer

KEY = "sesame"
SAMPLING = SamplingParams(max_new_tokens=1)
META = {"finish_reason": {"type": "stop"}, "weight_version": "0", "output_token_logprobs": [[-1.0, 4, None]]}


class Process:
    """An engine that serves in this process. `behave` runs before each answer; a restart ends it."""

    name, log, is_gone = "engine", "engine.log", False

    def __init__(self, behave: Callable[[], object]) -> None:
        self.behave: Callable[[], object] = behave
        self.restarts, self.answered = 0, list[float]()
        routes = {"/generate": self.generate, "/abort_request": lambda body: {}}
        self.http = HttpServer(0, KEY, routes)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    def generate(self, body: dict[str, Any]) -> Any:
        self.behave()
        self.answered.append(time.monotonic())
        meta = META | {"prompt_tokens": len(body["input_ids"]), "id": body["rid"]}
        return {"output_ids": [4], "meta_info": meta}

    def exit_code(self) -> int | None:
        return None

    def restart(self) -> None:
        self.restarts += 1
        self.behave = lambda: None

    def is_ready(self, timeout_s: float) -> bool:
        return True

    def exit_report(self) -> str:
        return ""


Start = Callable[..., tuple[Engine, list[Process]]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr("mrl.rollout.server.DEATH_WAIT_S", 0.0)
    with ExitStack() as stack:

        def make(*behaviors: Callable[[], object], timeout_s: float = 60.0) -> tuple[Engine, list[Process]]:
            processes = [Process(behave) for behave in behaviors]
            for process in processes:
                stack.callback(process.http.server_close)
                stack.callback(process.http.shutdown)
            servers = [Server(process.url, process) for process in processes]  # type: ignore[arg-type]
            pool = EnginePool(
                servers,
                Access(KEY),
                lambda url: Checked((), True),
                startup_timeout_s=9.0,
                max_restarts=1,
                memory_timeout_s=9.0,
            )
            pool._ready = True
            return Engine(pool, vocab_size=9, concurrent_requests=8, request_timeout_s=timeout_s), processes

        yield make


def requests(count: int) -> list[Request]:
    return [Request(i, i, Prompt(i, (1, 2), {}), i) for i in range(count)]


def test_engines_go_on_while_a_restarted_one_receives_its_weights(start: Start) -> None:
    """For three times as long as a request may take; in the thread that waits for the samples."""
    engine, (hangs, other) = start(lambda: time.sleep(9), lambda: time.sleep(0.05), timeout_s=1.0)
    syncs: list[tuple[threading.Thread, float, float]] = []

    def give_weights(url: str) -> None:
        began = time.monotonic()
        time.sleep(3.0)
        syncs.append((threading.current_thread(), began, time.monotonic()))

    notes: list[str] = []
    engine.restarts.allow(notes.append, give_weights)
    samples = engine.generate(requests(200), SAMPLING)
    assert [sample.request.sample_id for sample in samples] == [*range(200)]
    [(thread, began, ended)] = syncs
    assert thread is threading.current_thread() and len(notes) == 1
    assert sum(began < when < ended for when in other.answered) > 10
    assert (hangs.restarts, other.restarts, engine.restarts.made) == (1, 0, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_connection_that_breaks_at_an_engine_that_is_up_costs_no_restart(start: Start) -> None:
    breaks = iter(range(3))

    def behave() -> None:
        if next(breaks, None) is not None:
            raise SystemExit  # the thread of this connection ends without an answer

    engine, [process] = start(behave)
    engine.restarts.allow(lambda note: None, lambda url: None)
    assert len(engine.generate(requests(20), SAMPLING)) == 20
    assert process.restarts == 0


def test_an_error_of_who_receives_the_samples_ends_all(start: Start) -> None:
    engine, [process] = start(lambda: time.sleep(0.01))
    before = {*threading.enumerate()}

    def fails(samples: list[Sample]) -> None:
        raise KeyError("a bad reward")

    with pytest.raises(KeyError, match="a bad reward"):
        engine.generate(requests(1000), SAMPLING, fails)
    assert len(process.answered) < 1000
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name == "requests"]


def test_an_event_loop_that_cannot_start_is_an_error(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("no such certificate")

    engine, _ = start(lambda: None)
    monkeypatch.setattr(request_dispatcher, "tls", fails)
    with pytest.raises(OSError, match="no such certificate"):
        engine.generate(requests(1), SAMPLING)


def test_a_dispatcher_that_is_closed_ends_what_waits_for_it(start: Start) -> None:
    engine, [process] = start(lambda: time.sleep(0.2))
    threading.Timer(0.3, engine.dispatcher.close).start()
    with pytest.raises(RolloutError, match="sampling was interrupted"):
        engine.generate(requests(1000), SAMPLING)
    assert len(process.answered) < 100


def test_requests_of_one_prompt_are_a_group() -> None:
    one, other = Prompt(0, (1,), {}), Prompt(1, (1,), {})
    asked = [Request(i, 0, prompt, i) for i, prompt in enumerate((one, one, other, one))]
    assert [[request.sample_id for request in group.requests] for group in by_prompt(asked)] == [[0, 1], [2], [3]]
