"""Reward servers: whatever they answer, each sample gets a score or an error, in bounded time and memory."""

from __future__ import annotations

import gzip
import json
import re
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import pytest

from mrl.config.schema import DataConfig, RewardConfig
from mrl.reward.check import row_check
from mrl.reward.errors import RewardError
from mrl.reward.manager import RewardManager
from mrl.reward.server import known_defect
from tests.system.reward.test_reward_pool import sample

SHORT_S, LONG_S = 3.0, 60.0  # time-outs for servers that never answer, and for the others
Speak = Callable[["Answer"], None]


@dataclass
class FakeServer:
    """A server that answers each connection with `speak`. bodies: the requests in order of arrival"""

    url: str
    speak: Speak
    bodies: list[Any] = field(default_factory=list)


class Answer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        fake: FakeServer = self.server.fake  # type: ignore[attr-defined]
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self.rfile.readline()
            if not line:
                return
            head += line
        if head.startswith(b"GET"):  # the query for its model, which it does not answer
            return
        length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
        self.body = json.loads(self.rfile.read(length))
        fake.bodies.append(self.body)
        self.number = len(fake.bodies)
        self.wanted = len(self.body.get("samples", self.body.get("input_ids", [])))
        try:
            fake.speak(self)
        except OSError:
            pass  # the client has disconnected

    def send(self, body: bytes | str | Any, status: str = "200 OK", *headers: str) -> None:
        data = (
            body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        )
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", "Connection: close", *headers]
        self.wfile.write("\r\n".join([*lines, "", ""]).encode() + data)

    def begin(self, *headers: str) -> None:
        self.wfile.write("\r\n".join(["HTTP/1.1 200 OK", "Connection: close", *headers, "", ""]).encode())

    def drip(self, text: bytes, seconds: float) -> None:
        for _ in range(100):
            self.wfile.write(text)
            self.wfile.flush()
            time.sleep(seconds)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = daemon_threads = True

    with Server(("127.0.0.1", 0), Answer) as server:
        made = FakeServer(f"http://127.0.0.1:{server.server_address[1]}/score", lambda answer: None)
        server.fake = made  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield made
        server.shutdown()
        thread.join()


def open_manager(url: str, on_error: str = "zero", manager: str = "remote", **settings: object) -> RewardManager:
    server = {"url": url, "timeout_s": LONG_S, "retries": 0, "backoff_s": 0.02, **settings}
    return RewardManager(
        RewardConfig.model_validate({"manager": manager, "servers": {"judge": server}, "on_error": on_error})
    )


def lengths(answer: Answer) -> None:
    answer.send({"scores": [len(one["response"]) for one in answer.body["samples"]]})


def test_samples_go_out_in_batches_and_come_back_in_their_places(fake: FakeServer) -> None:
    fake.speak = lambda answer: answer.send(
        {
            "scores": [
                {"score": float(one["response"]), "row": one["row"]["answer"] == "7"} for one in answer.body["samples"]
            ]
        }
    )
    samples = [sample(i) for i in range(50)]
    with open_manager(fake.url, batch_size=8, connections=3) as manager:
        manager.collect(samples)
    assert [s.score for s in samples] == list(range(50))
    assert all(s.score_parts == {"row": 1.0} for s in samples)
    assert max(len(body["samples"]) for body in fake.bodies) == 8
    assert fake.bodies[0]["samples"][0]["prompt"].startswith("question ")


def test_a_sample_is_scored_while_others_are_still_to_come(fake: FakeServer) -> None:
    fake.speak = lengths
    one = sample(0, "abc")
    with open_manager(fake.url) as manager:
        manager.submit(one)
        end = time.monotonic() + 60
        while not fake.bodies and time.monotonic() < end:
            time.sleep(0.01)
        assert fake.bodies, "nothing was sent before `collect`"
        manager.collect([one])
    assert one.score == 3


HUGE = b"x" * (1 << 20)
BOMB = gzip.compress(bytes(32 << 20))
BIG_NUMBER = '{"scores": [' + "9" * 400 + "]}"
FAULTS: dict[str, tuple[Speak, str]] = {
    "no answer": (lambda a: time.sleep(2 * SHORT_S), r"no response within 3 s \(timeout_s\); attempts: 1"),
    "slow drip of the body": (
        lambda a: (a.begin("Content-Length: 1000"), a.drip(b" ", SHORT_S / 10))[0],
        "no response within 3 s",
    ),
    "slow drip of the head": (
        lambda a: (a.wfile.write(b"HTTP/1.1 200 OK\r\n"), a.drip(b"X: y\r\n", SHORT_S / 10))[1],
        "no response within 3 s",
    ),
    "hangs up": (lambda a: None, "RemoteProtocolError"),
    "hangs up in the middle": (
        lambda a: (a.begin("Content-Length: 100"), a.wfile.write(b"{"))[0],
        "RemoteProtocolError",
    ),
    "is no HTTP": (lambda a: a.wfile.write(b"220 smtp.example ready\r\n\r\n") and None, "RemoteProtocolError"),
    "500": (lambda a: a.send("out of memory", "500 Internal Server Error"), "HTTP 500: 'out of memory'; attempts: 1"),
    "404": (lambda a: a.send("no such route", "404 Not Found"), "HTTP 404: 'no such route'$"),
    "401": (lambda a: a.send("", "401 Unauthorized"), "HTTP 401"),
    "redirect to another host": (
        lambda a: a.send("", "307 Temporary Redirect", "Location: http://169.254.169.254/latest"),
        "HTTP 307 to 'http://169.254.169.254/latest': redirects are not followed",
    ),
    "not modified": (lambda a: a.send("", "304 Not Modified"), "HTTP 304: ''"),
    "choices without an address": (lambda a: a.send("which?", "300 Multiple Choices"), "HTTP 300: 'which[?]'"),
    "endless error page": (
        lambda a: (a.wfile.write(b"HTTP/1.1 400 Bad\r\n\r\n"), [a.wfile.write(HUGE) for _ in range(999)])[0] and None,
        "HTTP 400: 'xxx",
    ),
    "a page": (lambda a: a.send("<html>Welcome</html>"), "is not JSON .*<html>Welcome"),
    "JSON cut off": (lambda a: a.send('{"scores": [1'), "is not JSON"),
    "JSON of another form": (lambda a: a.send([1.0]), r'expected {"scores": \[...\]}, got \'\[1.0\]'),
    "another key": (lambda a: a.send({"rewards": [1.0]}), r"expected {\"scores\""),
    "JSON nested deeply": (lambda a: a.send("[" * 100_000), "nested too deeply"),
    "bytes": (lambda a: a.send(b"\xff\xfe\x00"), "is not JSON"),
    "too few": (lambda a: a.send({"scores": []}), "0 scores for 1 samples"),
    "too many": (lambda a: a.send({"scores": [1, 2]}), "2 scores for 1 samples"),
    "NaN": (lambda a: a.send('{"scores": [NaN]}'), "the score must be finite, got nan"),
    "infinity": (lambda a: a.send('{"scores": [1e999]}'), "the score must be finite, got inf"),
    "a number that is no float": (lambda a: a.send(BIG_NUMBER), "does not fit into a float"),
    "text for a number": (lambda a: a.send({"scores": ["1.0"]}), "must be a float, got str '1.0'"),
    "null": (lambda a: a.send({"scores": [None]}), "must be a float, got NoneType"),
    "no score among the parts": (lambda a: a.send({"scores": [{"good": 1}]}), r"without 'score', only \['good'\]"),
    "a huge answer": (
        lambda a: (a.begin(), [a.wfile.write(HUGE) for _ in range(50)])[0],
        r"longer than 1 MiB \(max_answer_mib\)",
    ),
    "a compressed answer": (
        lambda a: a.send(BOMB, "200 OK", "Content-Encoding: gzip"),
        r"compressed \(gzip\)",
    ),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.slow] * (name == "slow drip of the head")) for name in FAULTS]
)
def test_a_fault_is_named_with_server_and_sample(fake: FakeServer, fault: str) -> None:
    fake.speak, message = FAULTS[fault]
    began = time.monotonic()
    one = sample(3)
    timeout_s = SHORT_S if "no response" in message else LONG_S
    with open_manager(fake.url, max_answer_mib=1, timeout_s=timeout_s) as manager:
        manager.collect([one])
        assert one.score == 0 and manager.failures == 1
        assert time.monotonic() - began < 8 * SHORT_S, "the wait is bounded"
        who = re.escape(f"reward server 'judge' ({fake.url}) on sample 3 (row 103, prompt 'question 3'): ")
        assert re.match(who + f".*{message}", one.reward_error), one.reward_error
        fake.speak = lengths
        healthy = sample(4, "four")
        manager.collect([healthy])
        assert healthy.score == 4


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/score", "http://no-such-host.invalid/score"])
def test_a_server_that_is_not_there(url: str) -> None:
    with open_manager(url, on_error="stop") as manager, pytest.raises(RewardError, match="ConnectError"):
        manager.collect([sample(0)])


def test_no_password_is_shown(fake: FakeServer) -> None:
    fake.speak = FAULTS["401"][0]
    one = sample(0)
    with open_manager(fake.url.replace("//", "//me:secret@")) as manager:
        manager.collect([one])
    assert "HTTP 401" in one.reward_error and "secret" not in one.reward_error


@pytest.mark.parametrize("fault", [pytest.param("no answer", marks=pytest.mark.slow), "hangs up", "503", "429"])
def test_passing_faults_are_tried_again(fake: FakeServer, fault: str) -> None:
    broken = FAULTS[fault][0] if fault in FAULTS else lambda answer: answer.send("", f"{fault} Busy")
    fake.speak = lambda answer: broken(answer) if answer.number <= 2 else lengths(answer)
    one = sample(0, "abc")
    with open_manager(fake.url, retries=2, timeout_s=SHORT_S) as manager:
        manager.collect([one])
        assert (one.score, one.reward_error, len(fake.bodies)) == (3, "", 3)


@pytest.mark.parametrize(("fault", "attempts"), [("500", 3), ("404", 1), ("a page", 1), ("too few", 1)])
def test_only_passing_faults_are_tried_again(fake: FakeServer, fault: str, attempts: int) -> None:
    fake.speak = FAULTS[fault][0]
    with open_manager(fake.url, retries=2, on_error="stop") as manager, pytest.raises(RewardError):
        manager.collect([sample(0)])
    assert len(fake.bodies) == attempts


def test_one_bad_score_costs_its_own_sample_only(fake: FakeServer) -> None:
    def speak(answer: Answer) -> None:
        scores = [float(one["response"]) for one in answer.body["samples"]]
        answer.send(json.dumps({"scores": [float("nan") if score == 5 else score for score in scores]}))

    fake.speak = speak
    samples = [sample(i) for i in range(12)]
    with open_manager(fake.url, connections=1) as manager:
        manager.collect(samples)
    assert [s.score for s in samples] == [0.0 if i == 5 else i for i in range(12)]
    assert [bool(s.reward_error) for s in samples] == [i == 5 for i in range(12)]


@pytest.mark.parametrize("value", [float("nan"), object(), b"raw"], ids=["NaN", "an object", "bytes"])
def test_a_row_that_json_cannot_hold_names_the_sample_and_costs_no_other(fake: FakeServer, value: object) -> None:
    fake.speak = lengths
    message = "sample 3 .*its row cannot be sent to a reward server"
    with open_manager(fake.url, on_error="stop") as manager, pytest.raises(RewardError, match=message):
        manager.collect([sample(3, row={"extra": value})])
    samples = [sample(3, row={"extra": value}), sample(4, "four")]
    with open_manager(fake.url) as manager:
        manager.collect(samples)
    assert [s.score for s in samples] == [0, 4] and re.match(message, samples[0].reward_error)


@pytest.mark.parametrize("value", [float("nan"), datetime(2026, 1, 1), b"raw"], ids=["NaN", "a time", "bytes"])
def test_a_row_that_no_server_can_be_sent_is_found_before_a_run(value: object) -> None:
    def problem(api: str, extra: object) -> str | None:
        server = {"url": "http://judge:8000", "api": api}
        mix = {"recipe": {"*": {"judge": 1.0}}, "servers": {"judge": server}, "on_error": "zero"}
        cfg = RewardConfig.model_validate({"manager": "recipe", **mix})
        return row_check(cfg, DataConfig.model_validate({"train": "x.jsonl"}))({"prompt": "x", "extra": extra})

    assert (problem("mrl", value) or "").startswith("'extra' cannot be sent to a reward server: ")
    assert problem("mrl", [1.5, None, "é"]) is None and problem("sglang", value) is None


def test_closing_frees_whoever_waits(fake: FakeServer) -> None:
    fake.speak = FAULTS["no answer"][0]
    manager = open_manager(fake.url, timeout_s=100.0)
    manager.submit(one := sample(0))
    closer = threading.Timer(0.2, manager.close)
    closer.start()
    with pytest.raises(RewardError, match="client is closed"):
        manager.collect([one])
    closer.join()
    manager.close()
    assert not any(thread.name.startswith("reward-server") for thread in threading.enumerate())


def test_a_reward_model_gets_the_sample_s_own_tokens(fake: FakeServer) -> None:
    fake.speak = lambda answer: answer.send([{"embedding": [sum(ids)]} for ids in answer.body["input_ids"]])
    samples = [sample(i) for i in range(3)]
    for i, one in enumerate(samples):
        one.response_ids = np.array([10, i])
    with open_manager(fake.url, manager="model", api="sglang") as manager:
        manager.collect(samples)
    assert [s.score for s in samples] == [11, 12, 13]  # the prompt's one token is 1


def test_an_embedding_model_is_no_reward_model(fake: FakeServer) -> None:
    fake.speak = lambda answer: answer.send([{"embedding": [0.1, 0.2]}] * answer.wanted)
    with open_manager(fake.url, manager="model", api="sglang", on_error="stop") as manager:
        with pytest.raises(RewardError, match="got 2 numbers: check that it serves a reward model"):
            manager.collect([sample(0)])


@pytest.mark.parametrize(
    "about", [None, [], {"architectures": None}, {"architectures": [{}, ["LlamaForSequenceClassification"]]}]
)
def test_only_a_model_that_is_known_to_be_off_is_doubted(about: Any) -> None:
    assert known_defect(about) == ""
    assert "serves a Qwen3ForSequence" in known_defect({"architectures": [[], "Qwen3ForSequenceClassification"]})
