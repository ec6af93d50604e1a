"""Engines that score sequences for distillation: requests, answers, and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from mrl.inference import teacher_engine
from mrl.inference.access import Access
from mrl.inference.errors import BadAnswer, EngineError, EngineStartError
from mrl.inference.serving import BadRequest, Server
from mrl.inference.teacher_engine import TeacherEngine, read_scores
from mrl.ports import free_port


def scores(body: dict[str, Any]) -> Any:
    """Returns log-probs that identify their tokens: token t has -t, and its top tokens are t and t + 1."""
    start, ids = body["logprob_start_len"], body["input_ids"]
    rows = [[-float(token), token, None] for token in ids[start:]]
    meta: dict[str, Any] = {"input_token_logprobs": [[None, ids[start], None], *rows[1:]]}
    if k := body.get("top_logprobs_num"):
        assert k == 2
        meta["input_top_logprobs"] = [None, *([row, [-9.0, row[1] + 1, None]] for row in rows[1:])]
    assert body["sampling_params"]["max_new_tokens"] == 0 and body["return_logprob"]
    return {"output_ids": [], "meta_info": meta}


@contextmanager
def engine(
    generate: Callable[[Any], Any] = scores, timeout_s: float = 10.0, room: int = 100
) -> Iterator[TeacherEngine]:
    routes = {
        "/generate": generate,
        "/model_info": lambda body: {"model_path": "/models/big", "model_type": "llama", "weight_version": "default"},
        "/server_info": lambda body: {"max_req_input_len": room - 4},
    }
    server = Server(0, "key", routes)
    url = f"http://127.0.0.1:{server.port}"
    with closing(TeacherEngine(url, Access("key"), 4, timeout_s)) as found:
        yield found
    server.close()


def test_sequences_are_scored_in_their_order_from_their_first_generated_token() -> None:
    with engine() as teacher:
        found = list(teacher.score([([7, 8, 9], 1), ([1, 2, 3, 4], 3)], top_k=2))
        plain = list(teacher.score([([7, 8, 9], 2)], top_k=0))
    assert [each.log_probs.tolist() for each in found] == [[-8, -9], [-4]]
    assert [each.top_ids.tolist() for each in found] == [[[8, 9], [9, 10]], [[4, 5]]]
    assert found[0].top_log_probs.tolist() == [[-8, -9], [-9, -9]]
    assert plain[0].log_probs.tolist() == [-9] and plain[0].top_ids.shape == (1, 0)


def test_a_refusal_names_the_engine_and_is_not_repeated() -> None:
    asked = []

    def refuse(body: Any) -> Any:
        asked.append(body)
        raise BadRequest("the context is too short")

    with engine(refuse) as teacher, pytest.raises(EngineError, match=r"http://127.*HTTP 400: the context is too short"):
        list(teacher.score([([7, 8], 1)], top_k=0))
    assert len(asked) == 1


def test_an_engine_that_fails_for_a_while_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_engine, "AGAIN_S", 0.01)
    left = [RuntimeError("loading"), RuntimeError("loading")]

    def late(body: Any) -> Any:
        if left:
            raise left.pop()
        return scores(body)

    with engine(late) as teacher:
        assert next(iter(teacher.score([([7, 8], 1)], top_k=0))).log_probs.tolist() == [-8]


def test_an_engine_that_does_not_answer_ends_the_wait_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_engine, "AGAIN_S", 0.05)
    url = f"http://127.0.0.1:{free_port()}"
    with closing(TeacherEngine(url, Access(), 1, timeout_s=0.2)) as teacher:
        with pytest.raises(EngineError, match=rf"{url}.*no answer.*teacher.timeout_s = 0.2 s"):
            list(teacher.score([([7, 8], 1)], top_k=0))


def test_what_the_engine_serves_is_checked() -> None:
    with engine(room=64) as teacher:
        assert teacher.check("teacher", "big", "llama", 64).model_path == "/models/big"
        with pytest.raises(
            EngineStartError, match=r"serves /models/big, a llama model, and small is a qwen2 model: set t"
        ):
            teacher.check("teacher", "small", "qwen2", 64)
        with pytest.raises(EngineStartError, match="has room for 64 tokens .* may ask for 65"):
            teacher.check("teacher", "big", "llama", 65)


ROW = [-1.0, 8, None]
BAD = {
    "other tokens": ({"input_token_logprobs": [None, [-1.0, 9, None]]}, "1 tokens, which are not the 1 that"),
    "too few": ({"input_token_logprobs": [None]}, "0 tokens, which are not the 1"),
    "none": ({}, "input_token_logprobs is missing"),
    "no numbers": ({"input_token_logprobs": [None, [None, 8, None]]}, "not a number"),
    "not finite": ({"input_token_logprobs": [None, [float("nan"), 8, None]]}, "not a number"),
    "another form": ({"input_token_logprobs": [None, 3]}, "cannot be read"),
    "no top tokens": ({"input_token_logprobs": [None, ROW]}, "input_top_logprobs is missing"),
    "more rows": ({"input_token_logprobs": [None, ROW], "input_top_logprobs": [None, [ROW], [ROW]]}, "cannot be read"),
    "fewer rows": ({"input_token_logprobs": [None, ROW], "input_top_logprobs": [None]}, "has 0 rows"),
    "more than asked": ({"input_token_logprobs": [None, ROW], "input_top_logprobs": [None, [ROW] * 3]}, "cannot be re"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_answer_that_cannot_be_is_refused(name: str) -> None:
    info, says = BAD[name]
    with pytest.raises(BadAnswer, match=says):
        read_scores({"meta_info": info}, [8], 2 if "top" in name or "rows" in name or "more" in name else 0)


def test_a_row_may_have_fewer_tokens_than_asked() -> None:
    found = read_scores(
        {"meta_info": {"input_token_logprobs": [None, ROW], "input_top_logprobs": [None, [ROW]]}}, [8], 2
    )
    assert found.top_ids.tolist() == [[8, -1]] and found.top_log_probs[0, 1] < -1000
