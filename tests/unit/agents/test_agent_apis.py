"""Requests and answers of Anthropic's Messages API and OpenAI's Responses API, in the forms of the vendors' clients."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mrl.agents import anthropic_messages, chat, openai_responses
from mrl.agents.chat import Answer, BadChat, ChatRequest
from mrl.agents.endpoint import Endpoint

SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALLS = [
    {"id": f"call_1_{i}", "type": "function", "function": {"name": "look", "arguments": {"at": i}}} for i in range(2)
]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "go on"},
    {"role": "assistant", "content": "I look.", "tool_calls": CALLS},
    {"role": "tool", "content": "seen", "tool_call_id": "call_1_0"},
    {"role": "tool", "content": "", "tool_call_id": "call_1_1"},
    {"role": "user", "content": "and?"},
]
# requests of the `anthropic` client, with its cache markers
MESSAGES: dict[str, Any] = {
    "model": "claude",
    "max_tokens": 1024,
    "temperature": 1.0,
    "metadata": {"user_id": "1"},
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "tools": [
        {"name": "look", "description": "Looks.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
    ],
    "tool_choice": {"type": "auto"},
    "stream": True,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "go "}, {"type": "text", "text": "on"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look.", "citations": None},
                *({"type": "tool_use", "id": f"call_1_{i}", "name": "look", "input": {"at": i}} for i in range(2)),
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1_0", "content": [{"type": "text", "text": "seen"}]},
                {"type": "tool_result", "tool_use_id": "call_1_1"},
                {"type": "text", "text": "and?"},
            ],
        },
    ],
}
# requests of the `openai` client and of Codex
RESPONSES: dict[str, Any] = {
    "model": "gpt",
    "instructions": "Be brief.",
    "tools": [{"type": "function", **FUNCTION, "strict": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "store": False,
    "include": [],
    "prompt_cache_key": "k",
    "stream": True,
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        *(
            {
                "type": "function_call",
                "id": "fc",
                "call_id": f"call_1_{i}",
                "name": "look",
                "arguments": f'{{"at":{i}}}',
            }
            for i in range(2)
        ),
        {"type": "function_call_output", "call_id": "call_1_0", "output": "seen"},
        {"type": "function_call_output", "call_id": "call_1_1", "output": [{"type": "input_text", "text": ""}]},
        {"role": "user", "content": "and?"},
    ],
}


@pytest.mark.parametrize(("form", "body"), [(anthropic_messages, MESSAGES), (openai_responses, RESPONSES)])
def test_a_request_is_that_of_a_chat(form: Any, body: dict[str, Any]) -> None:
    assert form.parse_request(body) == ChatRequest(TALK, TOOLS, has_stream=True)
    plain = {name: value for name, value in body.items() if name not in ("tools", "stream")}
    assert form.parse_request(plain) == ChatRequest(TALK, [], has_stream=False)


def test_tools_may_be_declared_without_being_allowed() -> None:
    assert anthropic_messages.parse_request({**MESSAGES, "tool_choice": {"type": "none"}}).tools == []
    assert openai_responses.parse_request({**RESPONSES, "tool_choice": "none"}).tools == []


def test_short_forms_of_requests() -> None:
    said = [{"role": "user", "content": "hi"}]
    assert anthropic_messages.parse_request({"messages": said}).messages == said
    assert openai_responses.parse_request({"input": "hi"}).messages == said
    system = {"role": "developer", "content": "Be brief."}
    assert openai_responses.parse_request({"input": [system, *said]}).messages == [TALK[0], *said]
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": ""}
    [_, message] = openai_responses.parse_request({"input": [*said, call]}).messages
    assert message["content"] == "" and message["tool_calls"][0]["function"]["arguments"] == {}


GOOD = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"messages": []}, "messages must be a list of 1 to 10000 messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, r"messages\[0\] must be an object with a role of user"),
        ({"messages": [*GOOD, {"role": "assistant", "content": "{"}]}, "the last message is the assistant's"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, r"content\[0\] has the type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f", "input": {}}]}]}, "only text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must be text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
            r"messages\[0\].content\[0\].content\[0\] must be text",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}, *GOOD]},
            "the type 'thinking', which is not supported: only text and tool_use are",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": "x"}]}, *GOOD]},
            "arguments is not JSON",
        ),
        ({"tools": [{"name": "f", "type": "bash_20250124"}]}, "'bash_20250124': only tools of the client"),
        ({"tools": [{"name": "f", "defer_loading": True}]}, "defer_loading is not supported"),
        ({"tools": [{}]}, r"tools\[0\] must be"),
        ({"tools": {}}, None),
        ({"tool_choice": {"type": "any"}}, "tool_choice is .* not constrained"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice is"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice is"),
        ({"stop_sequences": ["x"]}, "stop_sequences is .* rollout.sampling.stop"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is .*: the run decides how"),
        ({"thinking": {"type": "disabled"}}, None),
        ({"output_config": {"effort": "low"}}, "output_config is not supported"),
        ({"mcp_servers": [{}]}, "mcp_servers is"),
        ({"mcp_servers": []}, None),
        ({"n": 2}, "n is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias is not supported"),
    ],
)
def test_requests_of_messages_are_refused_by_what_is_wrong(more: dict[str, Any], message: str | None) -> None:
    if message is None:
        anthropic_messages.parse_request({"messages": GOOD, **more})
        return
    with pytest.raises(BadChat, match=message):
        anthropic_messages.parse_request({"messages": GOOD, **more})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"input": []}, "input must be a list of 1 to 10000"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "must be text"),
        ({"input": [{"type": "reasoning", "summary": []}]}, r"input\[0\] has the type 'reasoning'"),
        ({"input": [{"role": "king", "content": "a"}]}, "the role 'king': it can be messages of system, developer"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "arguments is not JSON"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "name must be text"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\] must be"),
        ({"tool_choice": "required"}, "tool_choice is"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls is"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is .* send the whole conversation"),
        ({"background": True}, "background is"),
        ({"reasoning": {"effort": "low"}}, "reasoning is .*: the run decides how"),
        ({"text": {"format": {"type": "json_object"}}}, "text is"),
        ({"text": {"format": {"type": "text"}}}, None),
        ({"include": ["message.output_text.logprobs"]}, "include is"),
        ({"truncation": "auto"}, "truncation is"),
        ({"max_tool_calls": 1}, "max_tool_calls is not supported"),
    ],
)
def test_requests_of_responses_are_refused_by_what_is_wrong(more: dict[str, Any], message: str | None) -> None:
    if message is None:
        openai_responses.parse_request({"input": "a", **more})
        return
    with pytest.raises(BadChat, match=message):
        openai_responses.parse_request({"input": "a", **more})


def sent_back(form: Any, whole: dict[str, Any]) -> dict[str, Any]:
    """Returns the message that a client sends back when it appends the answer unchanged to its next request."""
    if form is anthropic_messages:
        body = {"messages": [*GOOD, {"role": "assistant", "content": whole["content"]}, *GOOD]}
    else:
        body = {"input": [*GOOD, *whole["output"], *GOOD]}
    messages: list[dict[str, Any]] = form.parse_request(json.loads(json.dumps(body))).messages
    assert len(messages) == 3
    return messages[1]


@pytest.mark.parametrize("form", [anthropic_messages, openai_responses])
@pytest.mark.parametrize("content", ["", "I look.", " \n", "é\u2028"])
@pytest.mark.parametrize("calls", [[], CALLS[:1], CALLS])
def test_an_answer_comes_back_as_the_message_that_it_was(form: Any, content: str, calls: list[Any]) -> None:
    message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    asked = ChatRequest([], TOOLS, has_stream=True)
    assert sent_back(form, form.completion(Answer(1, message, "stop", [5, 7]), asked)) == message


def test_the_answer_in_the_form_of_messages() -> None:
    asked = ChatRequest([], TOOLS, has_stream=False)
    found = anthropic_messages.completion(Answer(1, TALK[2], "stop", [5, 7]), asked)
    assert found["type"] == "message" and found["role"] == "assistant" and found["stop_sequence"] is None
    assert found["stop_reason"] == "tool_use"
    assert found["content"] == [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_1_0", "name": "look", "input": {"at": 0}},
        {"type": "tool_use", "id": "call_1_1", "name": "look", "input": {"at": 1}},
    ]
    assert (found["usage"]["input_tokens"], found["usage"]["output_tokens"]) == (5, 7)
    plain = {"role": "assistant", "content": "x"}
    ends = [
        anthropic_messages.completion(Answer(1, plain, f, [5, 7]), asked)["stop_reason"] for f in ("stop", "length")
    ]
    assert ends == ["end_turn", "max_tokens"]


def test_the_answer_in_the_form_of_responses() -> None:
    asked = ChatRequest([], TOOLS, has_stream=False)
    found = openai_responses.completion(Answer(1, TALK[2], "stop", [5, 7]), asked)
    assert found["object"] == "response" and found["status"] == "completed" and found["error"] is None
    assert [item["type"] for item in found["output"]] == ["message", "function_call", "function_call"]
    assert found["output"][0]["content"][0]["text"] == "I look."
    assert [(item["call_id"], json.loads(item["arguments"])) for item in found["output"][1:]] == [
        ("call_1_0", {"at": 0}),
        ("call_1_1", {"at": 1}),
    ]
    assert len({item["id"] for item in found["output"]}) == 3
    assert found["tools"] == [{"type": "function", "strict": False, **FUNCTION}]
    assert found["usage"]["total_tokens"] == 12
    cut = openai_responses.completion(Answer(1, {"role": "assistant", "content": "x"}, "length", [5, 7]), asked)
    assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}
    [*_, last] = openai_responses.events(Answer(1, {"role": "assistant", "content": "x"}, "length", [5, 7]), asked)
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"


def test_the_events_of_messages_make_up_the_answer() -> None:
    """The streamed events, assembled as Anthropic's client does, give the complete answer."""
    answer, asked = Answer(1, TALK[2], "stop", [5, 7]), ChatRequest([], TOOLS, has_stream=True)
    first, *between, changes, last = anthropic_messages.events(answer, asked)
    assert first["type"] == "message_start" and first["message"]["content"] == []
    assert (changes["type"], last) == ("message_delta", {"type": "message_stop"})
    blocks: list[dict[str, Any]] = []
    for start, delta, stop in zip(*[iter(between)] * 3, strict=True):
        kinds = [event["type"] for event in (start, delta, stop)]
        assert kinds == ["content_block_start", "content_block_delta", "content_block_stop"]
        assert [event["index"] for event in (start, delta, stop)] == [len(blocks)] * 3
        block = start["content_block"]
        if delta["delta"]["type"] == "text_delta":
            assert block["text"] == ""
            blocks.append({**block, "text": delta["delta"]["text"]})
        else:
            assert delta["delta"]["type"] == "input_json_delta" and block["input"] == {}
            blocks.append({**block, "input": json.loads(delta["delta"]["partial_json"])})
    made = {**first["message"], **changes["delta"], "content": blocks}
    made["usage"] = {**made["usage"], **changes["usage"]}
    assert made == anthropic_messages.completion(answer, asked)


def test_the_events_of_responses_make_up_the_answer() -> None:
    """The streamed events, assembled as OpenAI's client does, give the complete answer."""
    answer, asked = Answer(1, TALK[2], "stop", [5, 7]), ChatRequest([], TOOLS, has_stream=True)
    found = list(openai_responses.events(answer, asked))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *text, "output_item.done", *call, *call, "completed"]
    assert found[0]["response"]["output"] == [] and found[0]["response"]["status"] == "in_progress"
    items: list[dict[str, Any]] = []
    for event in found:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif event["type"] == "response.content_part.added":
            items[-1]["content"].append(event["part"])
        elif event["type"] == "response.output_text.delta":
            assert event["item_id"] == items[-1]["id"]
            items[-1]["content"][-1]["text"] += event["delta"]
        elif event["type"] == "response.function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif event["type"] == "response.output_item.done":
            assert event["item"] == {**items[-1], "status": "completed"}
    whole = found[-1]["response"]
    assert [{**item, "status": "completed"} for item in items] == whole["output"]
    assert whole == {**openai_responses.completion(answer, asked), "created_at": whole["created_at"]}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (500, "api_error"),
        (504, "api_error"),
    ],
)
def test_errors_are_in_the_form_of_the_api(status: int, kind: str) -> None:
    error = BadChat("no", "n", status=status)
    assert anthropic_messages.error_body(error) == {"type": "error", "error": {"type": kind, "message": "no"}}
    assert chat.error_body(error)["error"]["param"] == "n"


def test_a_harness_in_another_process_finds_both_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the user's own")
    env = Endpoint("http://127.0.0.1:5/v1", "key").env
    assert (env["OPENAI_BASE_URL"], env["ANTHROPIC_BASE_URL"]) == ("http://127.0.0.1:5/v1", "http://127.0.0.1:5")
    assert {env[name] for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")} == {"key"}
