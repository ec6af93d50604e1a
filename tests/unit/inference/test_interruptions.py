"""Responses that are aborted and continue with the next weights, with stub engines in this process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mrl.core import Prompt, Request, Sample, SamplingParams
from mrl.inference.errors import BadAnswer
from mrl.inference.request_dispatcher import RequestDispatcher
from mrl.inference.samples import Expected, PartialResponse, read_answer
from tests.helpers.stub_process import StubProcess, start

WAIT_S = 20.0


class Slow(StubProcess):
    """An engine that generates a token every 10 ms; the token is its position. It answers aborted requests with the
    tokens they have, and those without any as SGLang's queue does.

    first: prompt lengths of all requests; aborts: number of aborts of all requests
    """

    def __init__(self) -> None:
        super().__init__({"/abort_request": self.abort})
        self.aborts, self.version, self.first = 0, "0", list[int]()

    def generate(self, body: dict[str, Any]) -> Any:
        prompt, most, aborts = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"], self.aborts
        self.first.append(prompt)
        ids: list[int] = []
        while len(ids) < most and self.aborts == aborts:
            time.sleep(0.01)
            if self.aborts == aborts:
                ids.append(prompt + len(ids))
        finish = {"type": "length" if len(ids) == most else "abort"}
        meta = {"id": body["rid"], "finish_reason": finish, "weight_version": self.version}
        if ids:
            meta |= {"prompt_tokens": prompt, "output_token_logprobs": [[-1.0, token, None] for token in ids]}
        return {"output_ids": ids, "meta_info": meta}

    def abort(self, body: dict[str, Any]) -> Any:
        assert body == {"rid": "", "abort_all": True}
        self.aborts += 1
        return {}


@pytest.fixture
def slow() -> Iterator[Slow]:
    process = Slow()
    yield process
    process.close()


def serve_until_idle(dispatcher: RequestDispatcher, *, interrupt: bool) -> None:
    paused = dispatcher.pause(interrupt=interrupt)
    dispatcher.serve(lambda: paused.done() and not dispatcher.sent)


def test_interrupted_responses_keep_their_tokens_and_others_wait_for_the_next_weights(slow: Slow) -> None:
    with start([slow], concurrent_requests=4, vocab_size=1000) as engine:
        engine.versions |= {"0", "1"}
        sampling, dispatcher = SamplingParams(max_new_tokens=60), engine.dispatcher
        how = engine.generation(sampling, is_background=True, is_interruptible=True)
        asked = [Request(i, i, Prompt(i, (1, 2), {}), i) for i in range(6)]
        drawing = [dispatcher.submit(dispatcher.generate(request, how)) for request in asked]
        time.sleep(0.3)
        serve_until_idle(dispatcher, interrupt=True)
        assert slow.aborts and not any(done.done() for done in drawing)
        [evaluated] = engine.generate([Request(9, 9, Prompt(9, (1, 2), {}), 9)], SamplingParams(max_new_tokens=3))
        assert evaluated.response_ids.tolist() == [2, 3, 4], "what is not in the background waits too"
        slow.version = "1"
        dispatcher.resume()
        samples = [done.result(WAIT_S) for done in drawing]
    versions = [sample.token_weight_versions.tolist() for sample in samples]  # type: ignore[union-attr]
    assert all(sample.response_ids.tolist() == [*range(2, 62)] for sample in samples)
    assert all(sample.request is request for sample, request in zip(samples, asked))
    assert [sorted(each) == each and {*each} == {0, 1} for each in versions[:4]] == [True] * 4
    assert versions[4:] == [[1] * 60] * 2, "a request was sent while it was to wait"
    assert engine.pool.restarts.made == 0


def test_without_interruption_responses_in_flight_are_waited_for(slow: Slow) -> None:
    with start([slow], concurrent_requests=2, vocab_size=1000) as engine:
        engine.versions.add("0")
        dispatcher, asked = engine.dispatcher, [Request(i, i, Prompt(i, (1, 2), {}), i) for i in range(4)]
        how = engine.generation(SamplingParams(max_new_tokens=30), is_background=True)
        drawing = [dispatcher.submit(dispatcher.generate(request, how)) for request in asked]
        time.sleep(0.1)
        serve_until_idle(dispatcher, interrupt=False)
        assert len(slow.first) == 2 and not slow.aborts
        dispatcher.resume()
        assert [len(done.result(WAIT_S).response_ids) for done in drawing] == [30] * 4


def test_the_time_of_a_weight_sync_does_not_count_as_the_engines(slow: Slow) -> None:
    """The time of a weight sync does not count towards request time-outs. A sync takes three times the time-out while
    500 requests wait: none is lost and no engine is restarted."""
    with start([slow], concurrent_requests=50, vocab_size=1000, timeout_s=2.0) as engine:
        engine.versions |= {"0", "1"}
        dispatcher = engine.dispatcher
        how = engine.generation(SamplingParams(max_new_tokens=2), is_background=True, is_interruptible=True)
        paused = dispatcher.pause(interrupt=True)
        asked = [Request(i, i, Prompt(i, (1, 2), {}), i) for i in range(500)]
        drawing = [dispatcher.submit(dispatcher.generate(request, how)) for request in asked]
        dispatcher.serve(lambda: paused.done() and not dispatcher.sent)
        with engine.weight_sync("1"):
            time.sleep(6.0)
            engine.has_synced("1")
        assert not any(done.done() for done in drawing) and not slow.first
        dispatcher.resume()
        assert [len(done.result(WAIT_S).response_ids) for done in drawing] == [2] * 500
        assert (engine.pool.restarts.made, slow.restarts) == (0, 0)


def test_an_interrupted_request_names_weights_that_the_run_gave() -> None:
    meta = {"finish_reason": {"type": "abort"}, "weight_version": "default"}
    request, expected = Request(0, 0, Prompt(0, (1, 2), {}), 0), Expected(9, 4, {"0"}, is_interruptible=True)
    with pytest.raises(BadAnswer, match="weight_version is 'default', but the run gave the engine '0'"):
        read_answer(request, json.dumps({"output_ids": [], "meta_info": meta}).encode(), expected)


def part(ids: list[int], finish: str, version: str = "0", experts: np.ndarray | None = None) -> Sample:
    request = Request(0, 0, Prompt(0, (1, 2, 3), {}), 7)
    return Sample(request, np.array(ids), -np.ones(len(ids)), finish, version, routed_experts=experts)


def test_a_stop_text_that_may_have_begun_is_generated_again() -> None:
    found = PartialResponse.empty().longer(part([5, 6, 7, 8], "abort"), 9, stop=("ab", "a"))
    assert found.ids.tolist() == [5, 6] and not found.finish
    found = found.longer(part([7, 9], "stop", "1"), 9, stop=("ab",))
    assert (found.ids.tolist(), found.versions.tolist(), found.finish) == ([5, 6, 7, 9], [0, 0, 1, 1], "stop")


def test_a_token_keeps_the_experts_that_it_first_went_to() -> None:
    """A token keeps its first experts, [place, version], for prompt and response. The continued request asks only for
    experts that the earlier one lacks."""

    def experts(start: int, end: int, version: int) -> np.ndarray:
        found = np.stack([np.arange(start, end), np.full(end - start, version)], 1)[:, None].astype(np.uint8)
        found[-1] = 0
        return found

    first = PartialResponse.empty().longer(part([5, 6], "abort", experts=experts(0, 5, 0)), 4)
    request = first.rest_of(part([], "").request)
    assert request.prompt.token_ids == (1, 2, 3, 5, 6) and request.routed_experts_start == 4 and request.seed == 7
    assert first.longer(part([], "abort"), 4).experts is first.experts, "an answer without tokens has no experts"
    sample = first.longer(part([7, 8], "length", "1", experts(4, 7, 1)), 4).sample(part([], "").request)
    assert sample.routed_experts is not None and sample.finish_reason == "length"
    assert sample.routed_experts[:, 0].tolist() == [[0, 0], [1, 0], [2, 0], [3, 0], [4, 1], [5, 1], [0, 0]]


def test_pictures_stay_with_the_prompt_of_a_response_that_continues() -> None:
    prompt = Prompt(0, (1, 9, 9, 3), {}, pictures=(b"png",), unexpanded_token_ids=(1, 9, 3))
    found = PartialResponse.empty().longer(part([5], "abort"), 4).rest_of(Request(0, 0, prompt, 7)).prompt
    assert (found.token_ids, found.unexpanded_token_ids) == ((1, 9, 9, 3, 5), (1, 9, 3, 5))
    assert found.pictures == (b"png",)
