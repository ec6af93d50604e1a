"""Requests of OpenAI's Responses API (/v1/responses), translated to the form of `chat`, and the answers. Standard
library only.

Fields are accepted, ignored and refused as in `chat`. Responses are not stored: each request has the whole
conversation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from mrl.agents import chat
from mrl.agents.chat import Answer, BadChat, ChatRequest, Message

READ = ("input", "instructions", "tools", "stream", "stream_options")
THE_RUNS = ("model", "temperature", "top_p", "max_output_tokens")
SAYS_NOTHING = (*chat.SAYS_NOTHING, "prompt_cache_retention")
NOT_STORED = "responses are not stored: send the whole conversation as input"
RULES: chat.Rules = (
    ("previous_response_id", (), NOT_STORED),
    ("conversation", (), NOT_STORED),
    ("background", (False,), NOT_STORED),
    ("tool_choice", ("auto", "none"), chat.NOT_CONSTRAINED),
    ("parallel_tool_calls", (True,), chat.NOT_CONSTRAINED),
    ("text", ({}, {"format": {"type": "text"}}), chat.NOT_CONSTRAINED),
    ("reasoning", ({},), chat.THOUGHTS),
    ("include", ([], ["reasoning.encrypted_content"]), chat.RECORDED),
    ("top_logprobs", (0,), chat.RECORDED),
    ("truncation", ("disabled",), "shorten the input in the harness"),
)
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
OF_A_TOOL = ("type", "name", "description", "parameters", "strict")


def parse_request(body: Any) -> ChatRequest:
    """Parses a request body. Raises BadChat, which names the field and the problem."""
    if isinstance(body, dict) and isinstance(body.get("input"), str):
        body = {**body, "input": [{"role": "user", "content": body["input"]}]}
    items = chat.listed(body, "input")
    chat.refuse(body, {*READ, *THE_RUNS, *SAYS_NOTHING}, RULES)
    messages: list[Message] = []
    for i, item in enumerate(items):
        message = _message(item, f"input[{i}]")
        before = messages.pop() if "tool_calls" in message and messages else None
        messages += chat.joined([message] if before is None else [before, message])
    if instructions := chat.text_of(body.get("instructions"), "instructions"):
        messages = [{"role": "system", "content": instructions}, *messages]
    return ChatRequest(messages, chat.declared_tools(body, _tool), bool(body.get("stream")))


def _message(item: Any, where: str) -> Message:
    """Returns an item as a message. A call belongs to the message before it, if that is the assistant's."""
    item = item if isinstance(item, dict) else {}
    kind, role = item.get("type") or "message", item.get("role")
    if kind == "message" and role in ROLES:
        return {"role": ROLES[role], "content": chat.text_of(item.get("content"), f"{where}.content")}
    if kind == "function_call":
        call = chat.tool_call(item.get("call_id", ""), item.get("name"), item.get("arguments"), where)
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        said = chat.text_of(item.get("output"), f"{where}.output")
        return {"role": "tool", "content": said, "tool_call_id": str(item.get("call_id", ""))}
    can = f"messages of {', '.join(ROLES)}, function_call and function_call_output"
    raise BadChat(f"{where} has the type {str(kind)[:40]!r} and the role {str(role)[:40]!r}: it can be {can}", where)


def _tool(tool: Any, where: str) -> Message:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or tool.get("type") != "function":
        raise BadChat(f"{where} must be {{'type': 'function', 'name': ...}}: other tools are not supported", where)
    chat.refuse(tool, OF_A_TOOL)
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def completion(answer: Answer, asked: ChatRequest) -> Message:
    """Returns the answer as one object."""
    message, prompt, generated = chat.openai_message(answer.message), *answer.tokens
    is_cut = answer.finish == "length"
    state = {"status": "incomplete" if is_cut else "completed"}
    items: list[Message] = []
    if message["content"] or "tool_calls" not in message:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        head = {"type": "message", "id": f"msg_{answer.number}", "role": "assistant"}
        items.append({**head, **state, "content": [part]})
    for call in message.get("tool_calls", ()):
        head = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"]}
        items.append({**head, **state, **call["function"]})
    return {
        **{"id": f"resp_{answer.number}", "object": "response", "created_at": int(time.time()), "model": chat.MODEL},
        **{**state, "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None, "error": None},
        **{"output": items, "instructions": None, "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto"},
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in asked.tools],
        **{"temperature": None, "top_p": None},
        "usage": {
            **{"input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0}},
            **{"output_tokens": generated, "output_tokens_details": {"reasoning_tokens": 0}},
            "total_tokens": prompt + generated,
        },
    }


def events(answer: Answer, asked: ChatRequest) -> Iterator[Message]:
    """Yields the answer's events: each text, and the arguments of each call, come as a whole."""
    whole = completion(answer, asked)
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    found = [("created", {"response": begun}), ("in_progress", {"response": begun})]
    for i, item in enumerate(whole["output"]):
        found += _item_events(i, item)
    found.append((whole["status"], {"response": whole}))
    for number, (name, event) in enumerate(found):
        yield {"type": f"response.{name}", "sequence_number": number, **event}


def _item_events(i: int, item: Message) -> Iterator[tuple[str, Message]]:
    at = {"item_id": item["id"], "output_index": i}
    is_text = item["type"] == "message"
    empty: Message = {"content": []} if is_text else {"arguments": ""}
    yield "output_item.added", {"output_index": i, "item": {**item, "status": "in_progress", **empty}}
    if is_text:
        at, [part] = {**at, "content_index": 0}, item["content"]
        yield "content_part.added", {**at, "part": {**part, "text": ""}}
        yield "output_text.delta", {**at, "delta": part["text"], "logprobs": []}
        yield "output_text.done", {**at, "text": part["text"], "logprobs": []}
        yield "content_part.done", {**at, "part": part}
    else:
        yield "function_call_arguments.delta", {**at, "delta": item["arguments"]}
        yield "function_call_arguments.done", {**at, "name": item["name"], "arguments": item["arguments"]}
    yield "output_item.done", {"output_index": i, "item": item}
