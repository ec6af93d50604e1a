"""Agent harnesses that use Anthropic's Messages API or OpenAI's Responses API at the endpoint, with the vendors' own
clients and with the request bodies that these send."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from mrl.agents import AgentError
from tests.conftest import TinyModels
from tests.helpers.runs import results, samples, train
from tests.helpers.train_tools import write_config
from tests.system.agents.test_agent_endpoint import ENDS, Model, parts, play

pytestmark = pytest.mark.long

CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
NEEDS_ANTHROPIC = pytest.mark.skipif(
    importlib.util.find_spec("anthropic") is None, reason="the package anthropic (extra dev) is not installed"
)
HARNESSES = '''
import json, os, subprocess, sys, urllib.error, urllib.request

SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}

def post(ctx, path, body, **headers):
    headers = headers or {"x-api-key": ctx.endpoint.key}
    url = ctx.endpoint.anthropic_url + path
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

def said(ctx, path, body, **headers):
    status, answer = post(ctx, path, body, **headers)
    assert status == 200, answer
    return json.loads(answer)

def events(text):
    """Name and data of server-sent events."""
    found = []
    for event in text.strip().split("\\n\\n"):
        name, data = event.split("\\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found), found
    return found

def wire_messages(ctx, prompt):
    tools = [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}]
    body = {"model": "m", "max_tokens": 9, "system": "Be brief.", "tools": tools}
    messages = [{"role": "user", "content": prompt}]
    counted = said(ctx, "/v1/messages/count_tokens", {**body, "messages": messages} | {"max_tokens": None})
    bearer = {"Authorization": f"Bearer {ctx.endpoint.key}"}
    answer = said(ctx, "/v1/messages?beta=true", {**body, "messages": messages}, **bearer)
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}, counted
    [use] = answer["content"]
    assert answer["stop_reason"] == use["type"] == "tool_use" and (use["name"], use["input"]) == ("look", {"at": 1})
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "seen"}]
    messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
    counted = said(ctx, "/v1/messages/count_tokens", {**body, "messages": messages})
    status, text = post(ctx, "/v1/messages", {**body, "messages": messages, "stream": True})
    (first, start), *_, (last, _) = events(text)
    assert (status, first, last) == (200, "message_start", "message_stop")
    assert counted["input_tokens"] == start["message"]["usage"]["input_tokens"]
    return 1.0

def wire_responses(ctx, prompt):
    tools = [{"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True}]
    body = {"model": "m", "instructions": "Be brief.", "tools": tools, "store": False}
    given = [{"role": "user", "content": prompt}]
    [call] = said(ctx, "/v1/responses", {**body, "input": given})["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "look", {"at": 1})
    given += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "seen"}]
    status, text = post(ctx, "/v1/responses", {**body, "input": given, "stream": True})
    (first, _), *_, (last, end) = events(text)
    assert (status, first, last) == (200, "response.created", "response.completed") and end["response"]["output"]
    return 1.0

def refusals(ctx, prompt):
    good = {"messages": [{"role": "user", "content": "a"}]}
    status, text = post(ctx, "/v1/messages", good, **{"x-api-key": "guessed", "Authorization": "Bearer guessed"})
    assert status == 401 and json.loads(text)["error"]["type"] == "authentication_error", text
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        status, text = post(ctx, path, {**good, "thinking": {"type": "enabled", "budget_tokens": 1024}})
        assert status == 400 and json.loads(text)["type"] == "error" and "thinking is" in text, text
    assert post(ctx, "/v1/messages/batches", good)[0] == 404
    status, text = post(ctx, "/v1/responses", {"input": "a", "previous_response_id": "resp_1"})
    assert status == 400 and json.loads(text)["error"]["param"] == "previous_response_id", text
    long = {"messages": [{"role": "user", "content": "a" * 300_000}]}
    status, text = post(ctx, "/v1/messages/count_tokens", long)
    assert status == 400 and "more than agent.max_tokens can hold" in text, text
    said(ctx, "/v1/messages", good)
    return 1.0

def counts(ctx, prompt):
    """Counts tokens for ever."""
    while True:
        post(ctx, "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]})

def anthropic_client(ctx, prompt):
    import anthropic
    model = anthropic.Anthropic(base_url=ctx.endpoint.anthropic_url, api_key=ctx.endpoint.key, max_retries=0)
    tools = [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}]
    messages, asked = [{"role": "user", "content": prompt}], {"model": "m", "max_tokens": 9, "tools": tools}
    asked["system"] = "Be brief."
    counted = model.messages.count_tokens(model="m", messages=messages, tools=tools, system="Be brief.").input_tokens
    answer = model.messages.create(messages=messages, **asked)
    assert answer.usage.input_tokens == counted and answer.stop_reason == "tool_use"
    [use] = answer.content
    assert (use.name, use.input) == ("look", {"at": 1})
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "seen"}]
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    with model.messages.stream(messages=messages, **asked) as stream:
        text, answer = "".join(stream.text_stream), stream.get_final_message()
    assert [block.type for block in answer.content] == ["tool_use"] and answer.content[0].input == {"at": 1}, answer
    try:
        model.messages.create(messages=messages, stop_sequences=["x"], **asked)
    except anthropic.BadRequestError as error:
        assert "stop_sequences is" in str(error)
    else:
        raise AssertionError("stop_sequences were accepted")
    return 1.0

def anthropic_program(ctx, prompt):
    """A harness that is another program, which knows nothing but its variables."""
    ask = "messages.create(model='m', max_tokens=9, messages=[{'role': 'user', 'content': 'hi'}])"
    env = {**ctx.endpoint.env, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = f"import anthropic; print(anthropic.Anthropic().{ask}.content[0].text)"
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120)
    return 1.0

def responses_client(ctx, prompt):
    from openai import BadRequestError, OpenAI
    model = OpenAI(base_url=ctx.endpoint.url, api_key=ctx.endpoint.key, max_retries=0)
    tools = [{"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": False}]
    given, asked = [{"role": "user", "content": prompt}], {"model": "m", "instructions": "Be brief.", "tools": tools}
    answer = model.responses.create(input=given, temperature=0.3, **asked)
    [call] = answer.output
    assert (call.name, json.loads(call.arguments)) == ("look", {"at": 1}) and answer.status == "completed"
    given += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "seen"}]
    with model.responses.stream(input=given, **asked) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert [json.loads(call.arguments) for call in answer.output] == [{"at": 1}], answer
    try:
        model.responses.create(input=given, previous_response_id="resp_1", **asked)
    except BadRequestError as error:
        assert error.param == "previous_response_id"
    else:
        raise AssertionError("previous_response_id was accepted")
    return 1.0

def text_streams(ctx, prompt):
    """Text alone, which both clients put together from events."""
    from openai import OpenAI
    model = OpenAI(base_url=ctx.endpoint.url, api_key=ctx.endpoint.key)
    with model.responses.stream(model="m", input=prompt) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text != ""
    given = [{"role": "user", "content": each} for each in (prompt, "b")]
    given.insert(1, {"role": "assistant", "content": text})
    assert model.responses.create(model="m", input=given).output_text
    return 1.0
'''


@pytest.fixture(scope="module")
def harnesses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("apis") / "harnesses.py"
    file.write_text(HARNESSES)
    return file


@pytest.mark.parametrize(
    "name",
    [
        "wire_messages",
        "wire_responses",
        "responses_client",
        pytest.param("anthropic_client", marks=NEEDS_ANTHROPIC),
    ],
)
def test_calls_of_tools_go_on_by_the_same_tokens(harnesses: Path, name: str) -> None:
    model = Model(says=CALL)
    [sample] = play(harnesses, name, model, parser="hermes")
    [(ids, drawn)] = parts(sample)
    first, second = model.asked
    assert ids[: len(second.prompt.token_ids)] == list(second.prompt.token_ids), "an answer was tokenised again"
    assert model.shown(first).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert model.shown(second).count("<tool_call>") == 1 and model.shown(second).endswith(
        "tool\nseen<|im_end|>\n<|im_start|>assistant\n"
    )
    for request in model.asked:
        at = len(request.prompt.token_ids)
        assert drawn[at] and not drawn[at - 1]
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [m["role"] for m in sample.messages] == roles and sample.environment == {"score": 1.0}
    assert sample.num_generated_tokens == len(sample.log_probs) == sum(drawn)


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("refusals", 1),
        ("text_streams", 2),
        pytest.param("anthropic_program", 1, marks=[NEEDS_ANTHROPIC, pytest.mark.slow]),
    ],
)
def test_other_ways_of_clients(harnesses: Path, name: str, turns: int) -> None:
    [sample] = play(harnesses, name, Model(), workers=1)
    assert len(sample.messages) == 2 * turns and not sample.sequence_lens and sample.environment == {"score": 1.0}


def test_a_harness_that_only_counts_is_ended(harnesses: Path) -> None:
    with pytest.raises(AgentError, match="did not respond within 2 s"):
        play(harnesses, "counts", Model(), step_timeout_s=2, retries=0, workers=1)


# ---- a run

CLIENTS = """
import anthropic
from openai import OpenAI

TOOLS = [{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}]

def calls(text, tools):
    return [("look", {"letters": len(text)})] if tools else []

def play(ctx, prompt):
    model = anthropic.Anthropic(base_url=ctx.endpoint.anthropic_url, api_key=ctx.endpoint.key)
    messages = [{"role": "user", "content": ctx.row["prompt"]}]
    for _ in range(3):
        answer = model.messages.create(model="m", max_tokens=99, messages=messages, tools=TOOLS)
        messages.append({"role": "assistant", "content": answer.content})
        text = "".join(block.text for block in answer.content if block.type == "text")
        ctx.reward(sum(c.islower() for c in text) / 8)
        uses = [block for block in answer.content if block.type == "tool_use"]
        if answer.stop_reason == "tool_use":
            words = [{"type": "tool_result", "tool_use_id": use.id, "content": f"{use.input}"} for use in uses]
        else:
            words = [{"type": "text", "text": "on"}]
        messages.append({"role": "user", "content": words})
    return None
"""


@NEEDS_ANTHROPIC
def test_a_run_learns_from_an_unmodified_client_of_anthropic(tiny_models: TinyModels, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENTS)
    (tmp_path / "template.jinja").write_text(ENDS)
    config = write_config(
        tmp_path,
        tiny_models("llama"),
        run={"steps": 2},
        data={"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 64, "chat_template": True},
        rollout={"engine": "transformers", "sampling": {"max_new_tokens": 4, "stop_token_ids": [*range(5, 160)]}},
        agent={
            **{"rollout": f"{tmp_path / 'client.py'}:play", "parser": f"{tmp_path / 'client.py'}:calls"},
            **{"endpoint": True, "max_tokens": 400, "step_timeout_s": 90},
        },
        reward={"function": "environment"},
        batch={"prompts_per_step": 2, "samples_per_prompt": 3},
        algorithm={"adv_estimator": "grpo"},
    )
    train(tmp_path, config, f"model.chat_template={tmp_path / 'template.jinja'}")
    rows = results(tmp_path / "runs/run")
    assert rows[1]["mismatch/max_abs"] < 1e-4, "turns were drawn after other tokens than those that are learnt from"
    assert all(row["agent/turns"] == 3 for row in rows.values())
    found: list[dict[str, Any]] = samples(tmp_path / "runs/run")["step_1.jsonl"]
    assert len(found) == 6 and any(m["role"] == "tool" for row in found for m in row["messages"])
