"""An engine that dies, refuses or hangs during a rollout: one clear error in bounded time, and no process left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from mrl.config.schema import RolloutConfig, SamplingConfig
from mrl.core import Prompt, Request, SamplingParams
from mrl.inference import client
from mrl.inference.engine import Engine
from mrl.inference.errors import EngineError, EngineStartError, RolloutError
from mrl.inference.samples import generate_body
from mrl.inference.start import start_engine
from tests.conftest import TinyModels
from tests.helpers.tiny import tiny_tokenizer
from tests.system.inference.test_rollout_engines import greedy, requests
from tests.system.inference.test_rollout_supervisor import running, wait_until

pytestmark = pytest.mark.long

LONG = SamplingParams(max_new_tokens=450, temperature=1.0)


def descendants(pid: int) -> list[int]:
    """Returns the pids of a process and all its descendants."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, timeout=60).stdout
    parents = {int(child): int(parent) for child, parent in map(str.split, table.splitlines())}
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found


def generate_and_kill(engine: Engine, choose: Callable[[list[int]], int]) -> tuple[RolloutError, float]:
    """Kills a process of the engine with SIGKILL during a rollout. Returns (the error, seconds from kill to error)."""
    (process,) = engine.pool.processes
    tree = descendants(process.pid)
    killed_at: list[float] = []

    def kill() -> None:
        time.sleep(0.4)
        killed_at.append(time.monotonic())
        os.kill(choose(tree), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RolloutError) as caught:
        for _ in range(200):  # until the kill hits one of these rollouts
            engine.generate(requests([(5, 6, 7)] * 64), LONG)
    seconds = time.monotonic() - killed_at[0]
    killer.join()
    assert wait_until(lambda: not any(running(pid) for pid in tree), 10)
    return caught.value, seconds


def test_the_transformers_engine_killed_mid_rollout(tiny_models: TinyModels, tmp_path: Path) -> None:
    cfg = RolloutConfig(engine="transformers")
    with start_engine(cfg, str(tiny_models("llama")), "float32", tmp_path) as engine:
        engine.wait_ready()
        error, seconds = generate_and_kill(engine, lambda tree: tree[1])
    assert "engine 0" in str(error) and "SIGKILL" in str(error) and "serving" in str(error)
    assert seconds < 15


@pytest.mark.engine
def test_a_scratch_moe_sglang_with_stop_strings_then_killed(tiny_models: TinyModels, tmp_path: Path) -> None:
    """One server for three tests that need their own: random initial weights, stop strings, and a kill."""
    cfg = RolloutConfig(sampling=SamplingConfig(stop=("\n",)))
    weights = tiny_models("mixtral", seed=3)
    with start_engine(cfg, str(tiny_models("mixtral", weights=False)), "float32", tmp_path) as engine:
        engine.wait_ready()
        engine.pool.client(engine.urls[0]).update_weights_from_disk(str(weights), weight_version="pushed")
        model = AutoModelForCausalLM.from_pretrained(weights).float().eval()
        free = engine.generate(requests([(5, 6, 7)]), SamplingParams(temperature=0, max_new_tokens=30))[0]
        assert free.response_ids.tolist() == greedy(model, (5, 6, 7), 30)
        decode = tiny_tokenizer().decode
        stop = next(c for c in decode(free.response_ids.tolist())[3:] if c.isascii())
        cut = engine.generate(requests([(5, 6, 7)]), SamplingParams(temperature=0, max_new_tokens=30, stop=(stop,)))[0]
        assert cut.finish_reason == "stop"
        assert cut.response_ids.tolist() == free.response_ids.tolist()[: len(cut.response_ids.tolist())]
        assert stop in decode(cut.response_ids.tolist()) and stop not in decode(cut.response_ids.tolist()[:-1])
        error, seconds = generate_and_kill(engine, lambda tree: tree[-1])
    assert "engine 0" in str(error) and "exit code" in str(error) and "End of" in str(error)
    assert seconds < 20


@pytest.mark.engine
def test_a_bad_model_path_ends_with_the_engines_own_words(tiny_models: TinyModels, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    config = json.loads((tiny_models("llama") / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))
    with start_engine(RolloutConfig(), str(broken), "float32", tmp_path) as engine:
        with pytest.raises(EngineStartError, match=r"(?s)engine 0.*exit code.*NoSuchForCausalLM"):
            engine.wait_ready()


class Stub:
    """An HTTP server that answers like a healthy engine with these settings, except that `reply` answers /generate."""

    def __init__(
        self, model_type: str, reply: Callable[[BaseHTTPRequestHandler], None], settings: dict[str, Any] | None = None
    ) -> None:
        self.aborted = threading.Event()
        info = {"model_path": "m", "model_type": model_type, "weight_version": "0"}
        token = {"output_ids": [1], "meta_info": {"finish_reason": {"type": "length"}}}
        fixed = {"/model_info": info, "/server_info": settings or {}, "/abort_request": {}}
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.path == "/abort_request":
                    stub.aborted.set()
                answer(self, 200, fixed[self.path])

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
                if self.path == "/generate" and "rid" in body:
                    return reply(self)
                if self.path == "/abort_request":
                    stub.aborted.set()
                answer(self, 200, fixed.get(self.path, token))

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def answer(handler: BaseHTTPRequestHandler, status: int, body: object) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@pytest.fixture
def stub_engine(tiny_models: TinyModels, tmp_path: Path) -> Iterator[Callable[..., tuple[Stub, Engine]]]:
    stubs: list[Stub] = []

    def make(
        reply: Callable[[BaseHTTPRequestHandler], None], *servers: dict[str, Any], **settings: Any
    ) -> tuple[Stub, Engine]:
        new = [Stub("llama", reply, server) for server in servers or ({},)]
        stubs.extend(new)
        cfg = RolloutConfig(urls=tuple(stub.url for stub in new), **settings)
        return stubs[-1], start_engine(cfg, str(tiny_models("llama")), "float32", tmp_path)

    yield make
    for stub in stubs:
        stub.close()


def test_http_500_is_one_error_with_the_engines_text(stub_engine: Callable[..., tuple[Stub, Engine]]) -> None:
    stub, engine = stub_engine(lambda h: answer(h, 500, {"error": {"message": "CUDA out of memory"}}))
    with pytest.raises(RolloutError, match=r"/generate failed for sample \d+ .*HTTP 500.*CUDA out of memory"):
        engine.generate(requests([(1, 2)] * 100), LONG)
    assert stub.aborted.is_set(), "the requests that still ran on the engine were aborted"


@pytest.mark.parametrize(
    ("settings", "statuses"),
    [({}, [500]), ({"disable_radix_cache": True}, [500]), ({"disable_radix_cache": False}, [200, 500]),
     ({"disable_radix_cache": False}, [500])],
    ids=["says nothing", "no prefix cache", "prefix cache", "the prefill fails"],
)  # fmt: skip
def test_a_shared_prompt_is_prefilled_by_servers_that_have_a_prefix_cache(
    stub_engine: Callable[..., tuple[Stub, Engine]], settings: dict[str, Any], statuses: list[int]
) -> None:
    left = list(statuses)

    def reply(handler: BaseHTTPRequestHandler) -> None:
        answer(handler, left.pop(0) if left else 500, {"error": {"message": "out of memory"}})

    _, engine = stub_engine(reply, settings)
    engine.wait_ready()
    prompt = Prompt(0, tuple(range(40)), {})
    with pytest.raises(RolloutError, match="HTTP 500.*out of memory"):
        engine.generate([Request(i, 0, prompt, i) for i in range(4)], LONG)
    assert left == []


def test_a_time_out_names_the_sample(stub_engine: Callable[..., tuple[Stub, Engine]]) -> None:
    _, engine = stub_engine(lambda h: time.sleep(30), request_timeout_s=0.5)
    asked = [Request(12, 0, Prompt(77, (1, 2), {}), 1)]
    with pytest.raises(RolloutError, match=r"no answer for sample 12 \(data row 77\) within .*request_timeout_s = 0.5"):
        engine.generate(asked, LONG)


def test_an_answer_that_does_not_fit_the_request_is_refused(stub_engine: Callable[..., tuple[Stub, Engine]]) -> None:
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 4, None]], "weight_version": "0"}
    meta["prompt_tokens"] = 2
    _, engine = stub_engine(lambda h: answer(h, 200, {"output_ids": [4, 5], "meta_info": meta}))
    with pytest.raises(
        RolloutError, match="engine http.*sample 0: 2 tokens came with output_token_logprobs of 1 tokens"
    ):
        engine.generate(requests([(1, 2)]), LONG)


BOMB = zlib.compress(b"[" + b" " * (64 << 20), 9, wbits=31)


def bomb(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", str(len(BOMB)))
    handler.end_headers()
    handler.wfile.write(BOMB)


def flood(handler: BaseHTTPRequestHandler) -> None:
    """Answers with endless data."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    with suppress(OSError):
        while True:
            handler.wfile.write(b" " * (1 << 16))


@pytest.mark.parametrize(
    ("reply", "message"), [(bomb, "comes as 'gzip', and was asked for as it is"), (flood, "more than [0-9]+ bytes")]
)
def test_an_answer_that_no_memory_would_hold_is_not_read(
    reply: Callable[[BaseHTTPRequestHandler], None],
    message: str,
    stub_engine: Callable[..., tuple[Stub, Engine]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub, engine = stub_engine(reply)
    with pytest.raises(RolloutError, match=message):
        engine.generate(requests([(1, 2)]), LONG)
    monkeypatch.setattr(client, "MOST_BYTES", 1 << 20)
    with closing(engine.pool.client(stub.url)) as asking, pytest.raises(EngineError, match=f"HTTP 200: .*{message}"):
        asking.generate(generate_body(requests([(1, 2)])[0], LONG))


def test_servers_of_others_are_asked_how_a_push_must_be_made(stub_engine: Callable[..., tuple[Stub, Engine]]) -> None:
    two = {"tp_size": 2, "max_req_input_len": 122}
    _, engine = stub_engine(lambda h: None, two, two)
    engine.wait_ready()
    assert engine.pool.tensor == 2
    engine.check_room(126)
    with pytest.raises(EngineStartError, match=r"engine http.* has room for 126 tokens .* the run may ask for 127"):
        engine.check_room(127)
    _, mixed = stub_engine(lambda h: None, two, {"tp_size": 1})
    with pytest.raises(EngineStartError, match="has 1 tensor-parallel ranks .--tp-size., another one 2"):
        mixed.wait_ready()
    _, unfit = stub_engine(lambda h: None, {"pp_size": 2, "quantization": "fp8"})
    with pytest.raises(EngineStartError, match=r"engine http.* cannot serve this run: .*--pp-size.*; .*to fp8"):
        unfit.wait_ready()
    _, other = stub_engine(lambda h: None, {"dtype": "bfloat16", "speculative_algorithm": "EAGLE"}, deterministic=False)
    other.wait_ready()
    dtype, drafts = other.pool.notes
    assert "computes in bfloat16, and gets weights of a model in float32" in dtype and "EAGLE" in drafts


def test_in_flight_requests_are_bounded(stub_engine: Callable[..., tuple[Stub, Engine]]) -> None:
    now, most, lock = [0], [0], threading.Lock()
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 4, None]], "weight_version": "0"}
    meta["prompt_tokens"] = 2

    def reply(handler: BaseHTTPRequestHandler) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        answer(handler, 200, {"output_ids": [4], "meta_info": meta})

    _, engine = stub_engine(reply, concurrent_requests=3)
    samples = engine.generate(requests([(1, 2)] * 40), LONG)
    assert len(samples) == 40
    assert 1 < most[0] <= 3


def test_an_engine_without_seeded_sampling_is_named_at_start(stub_engine: Callable[..., tuple[Stub, Engine]]) -> None:
    _, engine = stub_engine(lambda h: None)
    engine.wait_ready()
    (note,) = engine.pool.notes
    assert "--enable-deterministic-inference" in note and engine.urls[0] in note
    _, meant = stub_engine(lambda h: None, deterministic=False)
    meant.wait_ready()
    assert meant.pool.notes == []


def test_requests_are_spread_over_servers(tiny_models: TinyModels, tmp_path: Path) -> None:
    cfg = RolloutConfig(engine="transformers", servers=2)
    with start_engine(cfg, str(tiny_models("llama")), "float32", tmp_path) as engine:
        assert len(engine.urls) == 2
        engine.wait_ready()
        asked = requests([(3 + i, 4) for i in range(64)])
        together = engine.generate(asked, SamplingParams(max_new_tokens=6))
        for index, url in enumerate(engine.urls):
            engine.pool.client(url).update_weights_from_disk(str(tiny_models("llama")), weight_version=str(index))
        assert {s.weight_version for s in engine.generate(asked, SamplingParams(max_new_tokens=6))} == {"0", "1"}
        one = engine.generate(asked[:1], SamplingParams(max_new_tokens=6))
        assert one[0].response_ids.tolist() == together[0].response_ids.tolist()
    assert (tmp_path / "engine_1.log").exists()
