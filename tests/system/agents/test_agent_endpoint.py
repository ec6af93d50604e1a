"""Agent harnesses not written for mrl, at an OpenAI endpoint: the run trains on exactly the tokens of the answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mrl import http_server
from mrl.agents import AgentError, chat
from mrl.agents.chat import BadChat
from mrl.agents.endpoint import Endpoint, Session
from mrl.agents.endpoint_server import EndpointServer
from mrl.agents.runner import AgentRunner
from mrl.config.schema import AgentConfig
from mrl.core import Prompt, Request, Sample
from mrl.data import collate
from mrl.inference.engine import Engine
from tests.conftest import TinyModels
from tests.helpers.runs import results, samples, train
from tests.helpers.train_tools import given, write_config
from tests.helpers.trajectories import play_all
from tests.system.agents.test_agents import KEEPS, PARAMS, STRIPS, ids_of
from tests.system.agents.test_agents import chat as talker

pytestmark = pytest.mark.long

END = "<|im_end|>"
HARNESSES = '''
import asyncio, json, socket, subprocess, sys, threading, urllib.error, urllib.request

def post(ctx, body, key=None, path="/chat/completions", raw=None):
    data = raw if raw is not None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key or ctx.endpoint.key}", "Content-Type": "application/json"}
    request = urllib.request.Request(ctx.endpoint.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)

def said(ctx, messages, **more):
    status, answer = post(ctx, {"model": "x", "messages": messages, **more})
    assert status == 200, answer
    return answer["choices"][0]["message"]

def client(ctx, prompt):
    from openai import OpenAI
    model, messages = OpenAI(base_url=ctx.endpoint.url, api_key=ctx.endpoint.key), []
    for turn in range(3):
        messages.append({"role": "user", "content": f"{prompt} {turn}"})
        answer = model.chat.completions.create(model="any", messages=messages, temperature=0.3, max_tokens=99)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        messages.append(answer.choices[0].message)
    return 1.0

async def streams(ctx, prompt):
    from openai import AsyncOpenAI
    async with AsyncOpenAI(base_url=ctx.endpoint.url, api_key=ctx.endpoint.key) as model:
        messages, text = [{"role": "user", "content": prompt}], ""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async for event in await model.chat.completions.create(model="any", messages=messages, **options):
            text += event.choices[0].delta.content or "" if event.choices else ""
        assert (await model.models.list()).data[0].id == "policy"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        await model.chat.completions.create(model="any", messages=messages)
    return 1.0

def program(ctx, prompt):
    """A harness that is another program, which knows nothing but two variables."""
    ask = "chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'hi'}])"
    code = f"import openai; openai.OpenAI().{ask}"
    subprocess.run([sys.executable, "-c", code], env=ctx.endpoint.env, check=True, timeout=120)
    return 1.0

def tools(ctx, prompt):
    from openai import OpenAI
    model = OpenAI(base_url=ctx.endpoint.url, api_key=ctx.endpoint.key)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": prompt}]
    answer = model.chat.completions.create(model="m", messages=messages, tools=tools).choices[0]
    [call] = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": 1})
    assert answer.finish_reason == "tool_calls"
    messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "seen"}]
    model.chat.completions.create(model="m", messages=messages, tools=tools)
    return 1.0

def rewrites(ctx, prompt):
    """Goes on; compacts; goes on with that; goes back to the first answer and on by another way."""
    first = [{"role": "user", "content": "a"}]
    first.append(said(ctx, first))
    said(ctx, [*first, {"role": "user", "content": "b"}])
    short = [{"role": "user", "content": "in short: a"}]
    short.append(said(ctx, short))
    said(ctx, [*short, {"role": "user", "content": "c"}])
    said(ctx, [*first, {"role": "user", "content": "d"}])
    return 1.0

def at_once(ctx, prompt):
    """Two at once, then the same again."""
    found = {}
    def ask(name):
        found[name] = said(ctx, [{"role": "user", "content": name}])["content"]
    threads = [threading.Thread(target=ask, args=(name,)) for name in ctx.row["names"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ask(sorted(found)[0])
    return {"score": 1.0, **{name: float(text) for name, text in found.items()}}

def refusals(ctx, prompt):
    good = {"messages": [{"role": "user", "content": "a"}]}
    call = {"function": {"name": "f", "arguments": "{"}}
    wrong = [
        ({}, "messages must be a list"), ({"messages": []}, "messages must be a list"),
        ({"messages": [{"role": "king", "content": "a"}]}, "role of system"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must be text"),
        ({"messages": [{"role": "assistant", "tool_calls": [call]}]}, "is not JSON"),
        ({**good, "n": 2}, "n is 2"), ({**good, "stop": ["x"]}, "stop is"), ({**good, "tools": [1]}, "tools[0]"),
        ({**good, "tool_choice": "required"}, "tool_choice is"),
        ({**good, "response_format": {"type": "json_object"}}, "response_format is"),
        ({**good, "logit_bias": {"5": -100}}, "logit_bias is"),
        ({**good, "presence_penalty": 0.5}, "presence_penalty is"),
        ({**good, "reasoning_effort": "low"}, "reasoning_effort is not supported"),
        ({**good, "messages": [{"role": "user", "content": "a" * 300_000}]}, "more than agent.max_tokens can hold"),
    ]
    for body, message in wrong:
        status, answer = post(ctx, body)
        assert status == 400 and message in answer["error"]["message"], (body, status, answer)
    assert post(ctx, good, key="guessed")[0] == 401
    assert post(ctx, good, path="/completions")[0] == 404
    for text in (b'{"messages": NaN}', b'{"messages": 1e999}', b'{"messages": [], "messages": []}'):
        status, answer = post(ctx, None, raw=text)
        assert status == 400 and "is not JSON" in answer["error"]["message"], answer
    assert post(ctx, None, raw=b"{")[0] == 400 and post(ctx, None, raw=b"[" * 100000)[0] == 400
    said(ctx, good["messages"])
    return 1.0

def leaves(ctx, prompt):
    """Hangs up in the middle of its first request, and asks again."""
    body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\\r\\nAuthorization: Bearer {ctx.endpoint.key}\\r\\n"
    port = int(ctx.endpoint.url.rpartition(":")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n".encode() + body)
    said(ctx, [{"role": "user", "content": "a"}])
    return 1.0

def ends(ctx, prompt):
    messages = []
    while True:
        messages.append({"role": "user", "content": "more"})
        messages.append(said(ctx, messages))
        ctx.reward(1)

def stubborn(ctx, prompt):
    said(ctx, [{"role": "user", "content": "a"}])
    while True:
        post(ctx, {"messages": [{"role": "user", "content": "a"}]})

def silent(ctx, prompt):
    return 1.0

class Env:
    reset = step = None
'''


@pytest.fixture(scope="module")
def harnesses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("harnesses") / "harnesses.py"
    file.write_text(HARNESSES)
    return file


class Model:
    """A model that answers each request with two digits of its seed, or with a given text."""

    def __init__(self, template: str = KEEPS, says: str = "", finish: str = "stop") -> None:
        self.tokenizer, self._says, self._finish = talker(template), says, finish
        self.asked: list[Request] = []

    def generate(self, requests: list[Request], params: object) -> list[Sample]:
        self.asked += requests
        end = [] if self._finish == "length" else [*ids_of(self.tokenizer, END)]
        found = []
        for request in requests:
            ids = self.tokenizer.encode_plain([self._says or str(request.seed % 90 + 10)])[0] + end
            found.append(Sample(request, np.array(ids), -np.arange(1.0, len(ids) + 1), self._finish, "7"))
        return found

    def shown(self, request: Request) -> str:
        return self.tokenizer.decode(request.prompt.token_ids, special=True)


def play(file: Path, name: str, model: Model, count: int = 1, row: Any = None, **settings: Any) -> list[Sample]:
    cfg = AgentConfig(rollout=f"{file}:{name}", endpoint=True, **settings)
    agents = AgentRunner(cfg, model.tokenizer, ids_of(model.tokenizer, END), is_chat=True)
    prompt = Prompt(5, (1, 2), row or {}, "go")
    try:
        asked = [Request(i, 0, prompt, 100 + i) for i in range(count)]
        return play_all(agents, asked, PARAMS, model.generate)
    finally:
        agents.close()


def parts(sample: Sample) -> list[tuple[list[int], list[bool]]]:
    """Returns the token ids of each sequence, and which of them the policy generated."""
    ids, begun = sample.token_ids.tolist(), len(sample.request.prompt.token_ids)
    assert sample.action_mask is not None
    drawn, found, at = [False] * begun + sample.action_mask.tolist(), [], 0
    for length in sample.sequence_lens or (len(ids),):
        found.append((ids[at : at + length], drawn[at : at + length]))
        at += length
    assert at == len(ids)
    return found


def test_an_unmodified_client_is_answered_by_the_model_and_its_turns_are_one_sequence(harnesses: Path) -> None:
    model = Model()
    samples = play(harnesses, "client", model, count=8, workers=1)
    for sample in samples:
        mine = [request for request in model.asked if request.sample_id == sample.request.sample_id]
        assert len(mine) == 3 and not sample.sequence_lens and sample.environment == {"score": 1.0}
        talk = sample.messages
        assert [m["role"] for m in talk] == ["user", "assistant"] * 3
        assert [m["content"] for m in talk[::2]] == ["go 0", "go 1", "go 2"]
        [(ids, drawn)] = parts(sample)
        whole = model.tokenizer.encode_plain([model.tokenizer.render_prompt(talk)])[0]
        assert whole[: len(ids)] == ids, "the client's words and answers are not what the template makes of them"
        for request in mine:
            at = len(request.prompt.token_ids)
            assert ids[:at] == list(request.prompt.token_ids) and drawn[at] and not drawn[at - 1]
        assert sample.log_probs.tolist() == [-1, -2, -3] * 3 and sample.num_generated_tokens == 9
    assert len({sample.messages[1]["content"] for sample in samples}) > 1, "samples of a group are the same"


@pytest.mark.parametrize(("name", "turns"), [("streams", 2), pytest.param("program", 1, marks=pytest.mark.slow)])
def test_other_ways_of_clients(harnesses: Path, name: str, turns: int) -> None:
    [sample] = play(harnesses, name, Model(), workers=1)
    assert len(sample.messages) == 2 * turns and not sample.sequence_lens


def test_calls_of_tools_come_as_such_and_go_on_by_the_same_tokens(harnesses: Path) -> None:
    model = Model(says='<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>')
    [sample] = play(harnesses, "tools", model, parser="hermes")
    [(ids, drawn)] = parts(sample)
    first, second = model.asked
    assert ids[: len(second.prompt.token_ids)] == list(second.prompt.token_ids), "an answer was tokenised again"
    assert model.shown(second).count("<tool_call>") == 1 and model.shown(second).endswith(
        "tool\nseen<|im_end|>\n" + "<|im_start|>assistant\n"
    )
    assert sample.messages[1]["tool_calls"][0]["function"]["name"] == "look"


def test_tokens_are_those_that_were_drawn_where_the_text_has_others(harnesses: Path) -> None:
    """The policy's tokens are kept if tokenizing their text gives others, here for half of a UTF-8 character."""
    model = Model()
    half = model.tokenizer.encode_plain(["é"])[0][:1]
    again = model.tokenizer.encode_plain([model.tokenizer.decode(half)])[0]
    assert again != half, "these are no ids that are tokenised otherwise"
    model.generate = lambda requests, params: [  # type: ignore[method-assign]
        model.asked.append(request)
        or Sample(request, np.array([*half, *ids_of(model.tokenizer, END)]), np.zeros(2), "stop", "7")
        for request in requests
    ]
    [sample] = play(harnesses, "client", model)
    assert not sample.sequence_lens
    assert sample.response_ids[sample.action_mask].tolist() == [*half, *ids_of(model.tokenizer, END)] * 3


def test_a_history_that_is_rewritten_is_another_sequence_and_each_turn_is_learnt_once(harnesses: Path) -> None:
    model = Model()
    [sample] = play(harnesses, "rewrites", model)
    found = parts(sample)
    texts = [model.tokenizer.decode(ids, special=True) for ids, _ in found]
    assert len(found) == 3, texts
    assert [text.count("assistant") for text in texts] == [2, 2, 2]
    turn = 3  # tokens of each turn
    assert [sum(drawn) for _, drawn in found] == [2 * turn, 2 * turn, turn], "the first answer is learnt twice"
    assert sample.num_generated_tokens == len(sample.log_probs) == 5 * turn
    assert texts[2].startswith(texts[0][: texts[0].index("user\nb")]), "the branch is not after the tokens of the first"
    assert [drawn[0] for _, drawn in found] == [False] * 3
    rollout = collate(0, [sample_as(sample, 0)])
    assert rollout.sequence_lens is not None and rollout.sequence_lens.tolist() == [len(ids) for ids, _ in found]
    shown, places = rollout.split_sequences([0])
    assert shown.num_samples == 3 and places == [0, 1, 2]
    assert shown.response_lens.tolist() == [2 * turn, 2 * turn, turn]


def sample_as(sample: Sample, number: int) -> Sample:
    sample.request = Request(number, 0, sample.request.prompt, sample.request.seed)
    return sample


def test_a_template_that_takes_thoughts_back_begins_new_sequences_by_itself(harnesses: Path) -> None:
    model = Model(STRIPS)
    [sample] = play(harnesses, "client", model)
    assert len(sample.sequence_lens) == 3 and sample.num_generated_tokens == 9
    roles = [m["role"] for m in sample.messages]
    assert roles.count("assistant") == 3 and roles.count("given answer") == 0 + 1 + 2


def test_a_turn_that_was_cut_off_is_not_gone_on_with(harnesses: Path) -> None:
    [sample] = play(harnesses, "client", Model(finish="length"))
    assert len(sample.sequence_lens) == 3 and sample.finish_reason == "length"


def test_requests_at_once_are_answered_the_same_in_any_order(harnesses: Path) -> None:
    first, other = (play(harnesses, "at_once", Model(), row={"names": names})[0] for names in ("xy", "yx"))
    assert first.environment == other.environment and len(first.sequence_lens) == 3
    assert first.environment["x"] != first.environment["y"]
    answers = [m["content"] for m in first.messages if m["role"] == "assistant"]
    assert len({*answers}) == 3, "the same question again had the same answer: nothing to compare in a group"


def test_wrong_requests_are_refused_by_what_is_wrong(harnesses: Path) -> None:
    [sample] = play(harnesses, "refusals", Model())
    assert sample.environment == {"score": 1.0} and len(sample.messages) == 2


def test_an_answer_that_nobody_has_got_is_not_learnt_and_is_the_same_again(harnesses: Path) -> None:
    model = Model()
    [sample] = play(harnesses, "leaves", model)
    assert sample.num_generated_tokens == 3 and not sample.sequence_lens and len(sample.messages) == 2
    assert len({request.seed for request in model.asked}) == 1


@pytest.mark.parametrize(("settings", "turns"), [({"max_turns": 2}, 2), ({"max_tokens": 46}, 1)])
def test_a_harness_without_turns_ends_with_its_rewards(harnesses: Path, settings: dict[str, int], turns: int) -> None:
    [sample] = play(harnesses, "ends", Model(), **settings)
    assert sample.environment == {"score": float(turns)} and len(sample.messages) == 2 * turns


def test_a_harness_that_never_ends_is_ended(harnesses: Path) -> None:
    with pytest.raises(AgentError, match="did not respond within 2 s"):
        play(harnesses, "stubborn", Model(), max_turns=1, step_timeout_s=2, retries=0, workers=1)


def test_a_run_that_does_not_answer_is_waited_for_in_bounded_time() -> None:
    session = Session(lambda question: None, lambda told, number, tools: {}, 0.1, 1000)
    with pytest.raises(BadChat, match="the run did not respond within 0.1 s") as caught:
        asyncio.run(session.generate({"messages": [], "tools": []}))
    assert caught.value.status == 504


def test_an_error_of_a_parser_is_told_to_the_harness() -> None:
    def broken(told: dict[str, Any], number: int, tools: list[Any]) -> dict[str, Any]:
        raise KeyError("no such call")

    told = {"answer": {"text": "x", "finish": "stop", "tokens": [1, 1]}}
    session = Session(lambda question: threading.Timer(0.1, lambda: session.answer(told)).start(), broken, 20, 1000)
    endpoint = EndpointServer().open(session)
    reply = httpx.post(
        f"{endpoint.url}/chat/completions",
        headers={"Authorization": f"Bearer {endpoint.key}"},
        json={"model": "m", "messages": [{"role": "user", "content": "hi"}]},
        timeout=20,
        trust_env=False,
    )
    assert reply.status_code == 500 and "KeyError: 'no such call'" in reply.text and session.arrived is None


def opened() -> Endpoint:
    """Opens an endpoint whose model answers "x" to every request."""
    told = {"answer": {"text": "x", "finish": "stop", "tokens": [1, 1]}}
    session = Session(
        lambda question: threading.Timer(0.01, lambda: session.answer(told)).start(),
        lambda told, number, tools: {"role": "assistant", "content": told["text"]},
        *(20, 1000),
    )
    return EndpointServer().open(session)


ASKED = b'{"messages": [{"role": "user", "content": "hi"}]}'


def raw(endpoint: Endpoint, *head: str, key: str = "") -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: here", f"Authorization: Bearer {key or endpoint.key}", *head]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


def connected(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection(("127.0.0.1", httpx.URL(endpoint.url).port or 0), timeout=20)


def test_a_connection_is_used_again_and_a_body_may_be_announced() -> None:
    endpoint = opened()
    with connected(endpoint) as connection:
        for _ in range(2):
            connection.sendall(raw(endpoint, f"Content-Length: {len(ASKED)}", "Expect: 100-continue"))
            assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(ASKED)
            assert connection.recv(10_000).startswith(b"HTTP/1.1 200 OK\r\n")
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (ASKED[:9], ASKED[9:], b""))
        connection.sendall(raw(endpoint, "Transfer-Encoding: chunked") + chunks)
        assert connection.recv(10_000).startswith(b"HTTP/1.1 200 OK\r\n")


def test_without_a_key_little_is_read_for_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of too many unauthenticated connections is closed. Authenticated connections do not count."""
    monkeypatch.setattr(http_server, "MAX_UNAUTHENTICATED", 3)
    monkeypatch.setattr(http_server, "HEAD_S", 1.0)
    endpoint = opened()
    with contextlib.ExitStack() as stack:
        honest = stack.enter_context(connected(endpoint))
        honest.sendall(raw(endpoint, f"Content-Length: {len(ASKED)}") + ASKED)
        assert honest.recv(10_000).startswith(b"HTTP/1.1 200 OK\r\n")
        first, *others = (stack.enter_context(connected(endpoint)) for _ in range(4))
        with contextlib.suppress(ConnectionResetError):
            assert first.recv(1) == b"", "a fourth stranger came"
        others[0].sendall(raw(endpoint, "Content-Length: 9", key="guessed"))
        assert others[0].recv(1000).startswith(b"HTTP/1.1 401 ") and others[0].recv(1) == b""
        with contextlib.suppress(ConnectionError):
            others[1].sendall(b"GET /v1/models HTTP/1.1\r\nX: " + b"x" * (1 << 20))
            assert others[1].recv(1000).startswith(b"HTTP/1.0 400 ") and others[1].recv(1) == b""
        for byte in b"GET /v1/models HTTP/1.1\r\nX: yyyyyy":  # one byte at a time
            with contextlib.suppress(ConnectionError):
                others[2].send(bytes([byte]))
            time.sleep(0.05)
        with contextlib.suppress(ConnectionError):
            assert others[2].recv(1) == b""
        honest.sendall(raw(endpoint, f"Content-Length: {len(ASKED)}") + ASKED)
        assert honest.recv(10_000).startswith(b"HTTP/1.1 200 OK\r\n"), "an honest client was dropped"


@pytest.mark.parametrize(
    ("name", "message"), [("silent", "before the model's first turn"), ("Env", "is not a function .ctx, prompt.")]
)
def test_harnesses_that_are_none(harnesses: Path, name: str, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        play(harnesses, name, Model(), retries=0, workers=1)


@pytest.mark.parametrize(
    "content", ["a", [{"type": "text", "text": "a"}], [{"type": "text", "text": ""}, {"type": "text", "text": "a"}]]
)
def test_a_message_is_the_same_however_a_client_writes_it(content: Any) -> None:
    message = {"role": "assistant", "content": content, "refusal": None, "audio": None, "annotations": []}
    assert chat.parse_request({"messages": [message]}).messages == [{"role": "assistant", "content": "a"}]


def test_calls_come_back_as_they_were_sent() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer, asked = chat.Answer(1, message, "stop", [1, 2]), chat.ChatRequest([], [], has_stream=True)
    [event, end, done] = chat.events(answer, asked)
    assert isinstance(event, dict) and isinstance(end, dict)
    assert end["choices"][0]["finish_reason"] == "tool_calls" and done == "[DONE]"
    for sent in (chat.openai_message(message), event["choices"][0]["delta"]):
        assert isinstance(sent["tool_calls"][0]["function"]["arguments"], str)
        assert chat.parse_request({"messages": [sent]}).messages == [message]
    with pytest.raises(BadChat, match="1 to 10000"):
        chat.parse_request({"messages": [message] * 10_001})


# ---- a run

ENDS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CLIENT = """
from openai import OpenAI

def play(ctx, prompt):
    if ctx.rng.random() < 0.2:
        raise KeyError("the tool is gone")
    model = OpenAI(base_url=ctx.endpoint.url, api_key=ctx.endpoint.key)
    messages = [{"role": "user", "content": ctx.row["prompt"]}]
    for number in range(3):
        answer = model.chat.completions.create(model="m", messages=messages).choices[0].message
        ctx.reward(sum(c.islower() for c in answer.content) / 8)
        messages += [answer, {"role": "user", "content": str(number)}]
    return None
"""


def test_a_run_learns_from_a_harness(tiny_models: TinyModels, sglang_engine: Engine, tmp_path: Path) -> None:
    """Trains with real SGLang, two context-parallel ranks and in-flight groups, though some harnesses fail."""
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "template.jinja").write_text(ENDS)
    config = write_config(
        tmp_path,
        tiny_models("llama"),
        run={"steps": 4},
        actor={"parallel": {"context": 2}, "optimizer": {"lr": 1e-3}},
        data={"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 64, "chat_template": True},
        rollout={
            **{"interrupt": "at_sync", "max_staleness": 1, "sampling": {"max_new_tokens": 4}},
            **given(sglang_engine, tmp_path),
        },
        agent={
            **{"rollout": f"{tmp_path / 'client.py'}:play", "endpoint": True, "on_error": "leave_out", "retries": 0},
            **{"max_tokens": 300, "step_timeout_s": 90},
        },
        reward={"function": "environment"},
        batch={"prompts_per_step": 4, "samples_per_prompt": 3, "samples_per_minibatch": 6},
        algorithm={"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}},
    )
    train(tmp_path, config, f"model.chat_template={tmp_path / 'template.jinja'}")
    rows = results(tmp_path / "runs/run")
    assert rows[1]["mismatch/max_abs"] < 1e-4, "sequences were drawn after other tokens than those that are learnt from"
    left_out = [row["agent/left_out"] for row in rows.values()]
    assert sum(left_out) > 0 and len(left_out) == 4
    assert all(row["agent/sequences"] > 1 and row["agent/turns"] == 3 for row in rows.values())
    found = samples(tmp_path / "runs/run")
    for step in range(4):
        written = found[f"step_{step + 1}.jsonl"]
        assert 0 < len(written) <= 12 - left_out[step]
        assert all(row["messages"][0]["content"].startswith("train") and row["score"] >= 0 for row in written)
