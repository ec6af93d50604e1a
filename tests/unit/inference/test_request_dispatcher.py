"""Dispatch of requests over engines that hang, break connections, or receive weights, with stubs in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from mrl.core import Prompt, Request, Sample, SamplingParams
from mrl.inference import request_dispatcher
from mrl.inference.engine import Engine
from mrl.inference.errors import EngineError, RolloutError
from mrl.inference.request_dispatcher import by_prompt
from tests.helpers import stub_process
from tests.helpers.stub_process import StubProcess

SAMPLING = SamplingParams(max_new_tokens=1)
META = {"finish_reason": {"type": "stop"}, "weight_version": "0", "output_token_logprobs": [[-1.0, 4, None]]}


class Process(StubProcess):
    """An engine that calls `behave` before each answer; a restart resets it."""

    def __init__(self, behave: Callable[[], object]) -> None:
        self.behave: Callable[[], object] = behave
        self.answered: list[float] = []
        super().__init__({"/abort_request": lambda body: {}})

    def generate(self, body: dict[str, Any]) -> Any:
        self.behave()
        self.answered.append(time.monotonic())
        meta = META | {"prompt_tokens": len(body["input_ids"]), "id": body["rid"]}
        return {"output_ids": [4], "meta_info": meta}

    def restart(self) -> None:
        super().restart()
        self.behave = lambda: None


Start = Callable[..., tuple[Engine, list[Process]]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr("mrl.inference.server.DEATH_WAIT_S", 0.0)
    with ExitStack() as stack:

        def make(*behaviors: Callable[[], object], timeout_s: float = 60.0) -> tuple[Engine, list[Process]]:
            processes = [Process(behave) for behave in behaviors]
            for process in processes:
                stack.callback(process.close)
            return stack.enter_context(stub_process.start(processes, timeout_s=timeout_s)), processes

        yield make


def requests(count: int) -> list[Request]:
    return [Request(i, i, Prompt(i, (1, 2), {}), i) for i in range(count)]


def test_engines_go_on_while_a_restarted_one_receives_its_weights(start: Start) -> None:
    """Other engines continue while a restarted one receives its weights for three times the request time-out. The
    thread that waits for the samples sends the weights."""
    engine, (hangs, other) = start(lambda: time.sleep(9), lambda: time.sleep(0.05), timeout_s=1.0)
    syncs: list[tuple[threading.Thread, float, float]] = []

    def give_weights(url: str) -> None:
        began = time.monotonic()
        time.sleep(3.0)
        syncs.append((threading.current_thread(), began, time.monotonic()))

    notes: list[str] = []
    engine.pool.restarts.allow(notes.append, give_weights)
    samples = engine.generate(requests(200), SAMPLING)
    assert [sample.request.sample_id for sample in samples] == [*range(200)]
    [(thread, began, ended)] = syncs
    assert thread is threading.current_thread() and len(notes) == 1
    assert sum(began < when < ended for when in other.answered) > 10
    assert (hangs.restarts, other.restarts, engine.pool.restarts.made) == (1, 0, 1)


def test_an_engine_that_hangs_after_a_failed_weight_sync_is_restarted(start: Start) -> None:
    engine, [hangs, _] = start(lambda: time.sleep(9), lambda: None, timeout_s=0.5)
    engine.pool.restarts.allow(lambda note: None, lambda url: None)
    with pytest.raises(EngineError, match="out of memory"):
        with engine.weight_sync("1"):
            raise EngineError(hangs.url, "update_weights_from_tensor", 500, "out of memory")
    assert not engine.pool.is_syncing
    assert len(engine.generate(requests(20), SAMPLING)) == 20 and hangs.restarts == 1


def test_a_connection_that_breaks_at_an_engine_that_is_up_costs_no_restart(start: Start) -> None:
    breaks = iter(range(3))

    def behave() -> None:
        if next(breaks, None) is not None:
            raise ConnectionAbortedError

    engine, [process] = start(behave)
    engine.pool.restarts.allow(lambda note: None, lambda url: None)
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
