"""Requests of Anthropic's Messages API (/v1/messages), translated to the form of `chat`, and the answers. Standard
library only.

Fields are accepted, ignored and refused as in `chat`: the run decides how turns are sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrl import strict_json
from mrl.agents import chat
from mrl.agents.chat import Answer, BadChat, ChatRequest, Message

READ = ("messages", "system", "tools", "stream")
THE_RUNS = ("model", "max_tokens", "temperature", "top_p", "top_k")
SAYS_NOTHING = ("metadata", "service_tier", "inference_geo", "cache_control", "user_profile_id", "workspace_id")
CHOICES = ({"type": "auto"}, {"type": "none"}, {"type": "auto", "disable_parallel_tool_use": False})
RULES: chat.Rules = (
    ("tool_choice", CHOICES, chat.NOT_CONSTRAINED),
    ("stop_sequences", ([],), chat.STOPS),
    ("thinking", ({"type": "disabled"},), chat.THOUGHTS),
    ("mcp_servers", ([],), "the harness runs the tools"),
)
OF_A_TOOL = ("name", "description", "input_schema", "type", "cache_control", "strict", "eager_input_streaming")
ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def parse_request(body: Any) -> ChatRequest:
    """Parses a request body. Raises BadChat, which names the field and the problem."""
    given = chat.listed(body, "messages")
    chat.refuse(body, {*READ, *THE_RUNS, *SAYS_NOTHING}, RULES)
    messages = [message for i, each in enumerate(given) for message in _messages(each, f"messages[{i}]")]
    if messages[-1]["role"] == "assistant":
        raise BadChat("the last message is the assistant's: to continue a given answer is not supported", "messages")
    if system := chat.text_of(body.get("system"), "system"):
        messages = [{"role": "system", "content": system}, *messages]
    return ChatRequest(messages, chat.declared_tools(body, _tool), bool(body.get("stream")))


def _messages(message: Any, where: str) -> list[Message]:
    """Returns the messages of the internal form: each tool_result is one of its own."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise BadChat(f"{where} must be an object with a role of user, assistant", f"{where}.role")
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": chat.text_of(content, f"{where}.content")}]
    found: list[Message] = [] if content else [{"role": role, "content": ""}]
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            found.append({"role": role, "content": chat.text_of([block], f"{where}.content")})
        elif kind == "tool_use" and role == "assistant":
            call = chat.tool_call(block.get("id", ""), block.get("name"), block.get("input"), at)
            found.append({"role": role, "content": "", "tool_calls": [call]})
        elif kind == "tool_result" and role == "user":
            said = chat.text_of(block.get("content"), f"{at}.content")
            found.append({"role": "tool", "content": said, "tool_call_id": str(block.get("tool_use_id", ""))})
        else:
            can = "text and tool_use" if role == "assistant" else "text and tool_result"
            raise BadChat(f"{at} has the type {str(kind)[:40]!r}, which is not supported: only {can} are", at)
    return chat.joined(found)


def _tool(tool: Any, where: str) -> Message:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise BadChat(f"{where} must be {{'name': ..., 'input_schema': ...}}", where)
    if tool.get("type") not in (None, "custom"):
        raise BadChat(f"{where} has the type {str(tool['type'])[:40]!r}: only tools of the client are supported", where)
    chat.refuse(tool, OF_A_TOOL)
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    function = {ours: tool[theirs] for theirs, ours in names.items() if tool.get(theirs) is not None}
    return {"type": "function", "function": function}


def completion(answer: Answer, asked: ChatRequest) -> Message:
    """Returns the answer as one object."""
    text, calls = answer.message["content"], answer.message.get("tool_calls", ())
    blocks: list[Message] = [{"type": "text", "text": text}] if text or not calls else []
    for call in calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    prompt, generated = answer.tokens
    ends = "max_tokens" if answer.finish == "length" else "tool_use" if calls else "end_turn"
    return {
        **{"id": f"msg_{answer.number}", "type": "message", "role": "assistant", "model": chat.MODEL},
        **{"content": blocks, "stop_reason": ends, "stop_sequence": None},
        "usage": {
            **{"input_tokens": prompt, "output_tokens": generated},
            **{"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
        },
    }


def events(answer: Answer, asked: ChatRequest) -> Iterator[Message]:
    """Yields the answer's events: each block comes as a whole."""
    whole = completion(answer, asked)
    begun = {**whole, "content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for i, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty: Message = {"text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": strict_json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": i, "content_block": {**block, **empty}}
        yield {"type": "content_block_delta", "index": i, "delta": delta}
        yield {"type": "content_block_stop", "index": i}
    ends = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ends, "usage": {"output_tokens": whole["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


def error_body(error: BadChat) -> Message:
    """Returns the body of an error in the form of Anthropic's API."""
    kind = "api_error" if error.status >= 500 else ERRORS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
