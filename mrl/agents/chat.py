"""Chat completion requests of harnesses (OpenAI's /v1/chat/completions), and the answers. Standard library only.

The run's configuration decides how turns are sampled: the parameters in THE_RUNS are accepted and ignored. Every other
parameter that would change the answer (several choices, stop words, biases, penalties, a forced format) is refused by
name, and so is every unknown one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mrl import strict_json

Message = dict[str, Any]  # "role", "content", and what else the chat template knows
ROLES = ("system", "developer", "user", "assistant", "tool")
MODEL = "policy"  # the model's name, whatever name the client uses
MAX_MESSAGES = 10_000
READ = ("messages", "tools", "tool_choice", "stream", "stream_options")
THE_RUNS = ("model", "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "seed")
SAYS_NOTHING = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")  # of the turn


class BadChat(ValueError):
    """A request that cannot be answered. param: name of the field; status: of HTTP"""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    @property
    def body(self) -> dict[str, Any]:
        """Error body in the form of OpenAI's API."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """Parsed request. messages: normalised; has_stream: stream the answer as events; with_usage: including token
    counts
    """

    messages: list[Message]
    tools: list[Message]
    has_stream: bool
    with_usage: bool

    @property
    def question(self) -> Message:
        """Question to rank 0."""
        return {"messages": self.messages, "tools": self.tools}


def parse_request(body: Any) -> ChatRequest:
    """Parses a request body. Raises BadChat, which names the field and the problem."""
    if not isinstance(body, dict):
        raise BadChat("the body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise BadChat(f"messages must be a list of 1 to {MAX_MESSAGES} messages", "messages")
    _refuse(body)
    stream = body.get("stream_options")
    return ChatRequest(
        [_message(each, f"messages[{i}]") for i, each in enumerate(messages)],
        _tools(body) if body.get("tool_choice") != "none" else [],
        bool(body.get("stream")),
        isinstance(stream, dict) and bool(stream.get("include_usage")),
    )


def _refuse(body: Mapping[str, Any]) -> None:
    known = {*READ, *THE_RUNS, *SAYS_NOTHING}
    biased = "training uses the log-probs of the run's sampling parameters"
    for name, only, why in (
        ("n", (1,), "a trajectory has one response per request"),
        ("stop", ([], ""), "set rollout.sampling.stop of the run instead"),
        ("tool_choice", ("auto", "none"), "the output of the model is not constrained"),
        ("response_format", ({"type": "text"},), "the output of the model is not constrained"),
        ("functions", ([],), "use tools"),
        ("function_call", ("auto", "none"), "use tools and tool_choice"),
        ("parallel_tool_calls", (True,), "the output of the model is not constrained"),
        ("logprobs", (False,), "they are recorded for the trainer"),
        ("top_logprobs", (0,), "they are recorded for the trainer"),
        ("logit_bias", ({},), biased),
        ("presence_penalty", (0,), biased),
        ("frequency_penalty", (0,), biased),
        ("repetition_penalty", (1,), biased),
        ("modalities", (["text"],), "the model generates text"),
    ):
        known.add(name)
        if body.get(name) is not None and not any(body[name] == value for value in only):
            raise BadChat(f"{name} is {strict_json.dumps(body[name])[:80]}, which is not supported: {why}", name)
    if unknown := sorted(name for name in body.keys() - known if body[name] is not None):
        raise BadChat(f"{unknown[0][:80]} is not supported: leave it out", unknown[0][:80])


def _tools(body: Mapping[str, Any]) -> list[Message]:
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise BadChat("tools must be a list", "tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or tool.get("type") != "function"
        ):
            raise BadChat(f"tools[{i}] must be {{'type': 'function', 'function': {{'name': ...}}}}", f"tools[{i}]")
    return tools


def _message(message: Any, where: str) -> Message:
    """Normalises a message: text content and no empty keys, so that an answer is recognised when it is sent back."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise BadChat(f"{where} must be an object with a role of {', '.join(ROLES)}", f"{where}.role")
    found: Message = {"role": message["role"], "content": _text(message.get("content"), f"{where}.content")}
    if found["role"] == "assistant" and message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise BadChat(f"{where}.tool_calls must be a list", f"{where}.tool_calls")
        found["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := message.get(name)) is not None:
            if not isinstance(value, str):
                raise BadChat(f"{where}.{name} must be text", f"{where}.{name}")
            found[name] = value
    return found


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadChat(f"{where} must be text, or a list of parts", where)
    parts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadChat(f"{where}[{i}] must be text: other parts are not supported", f"{where}[{i}]")
        parts.append(part["text"])
    return "".join(parts)


def _call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadChat(f"{where} must be {{'id': ..., 'type': 'function', 'function': ...}}", where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = strict_json.loads(arguments or "{}")
        except ValueError as error:
            raise BadChat(f"{where}.function.arguments is not JSON: {error}", where) from None
    if not isinstance(arguments, dict):
        raise BadChat(f"{where}.function.arguments must be a JSON object", where)
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def openai_message(message: Message) -> Message:
    """Returns a message in the form of OpenAI's API: arguments of calls are text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": strict_json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def completion(number: int, message: Message, finish: str, tokens: list[int]) -> Message:
    """Returns the answer as one object. number: of the turn; tokens: number in the prompt, and in the answer."""
    choice = {
        "index": 0,
        "message": openai_message(message),
        "finish_reason": _finish(message, finish),
        "logprobs": None,
    }
    return {**_head(number, "chat.completion"), "choices": [choice], "usage": _usage(tokens)}


def events(number: int, message: Message, finish: str, tokens: list[int], with_usage: bool) -> Iterator[str]:
    """Yields the data of the answer's events."""
    head, delta = _head(number, "chat.completion.chunk"), openai_message(message)
    if "tool_calls" in delta:
        delta = {**delta, "tool_calls": [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]}
    yield strict_json.dumps({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield strict_json.dumps({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish(message, finish)}]})
    if with_usage:
        yield strict_json.dumps({**head, "choices": [], "usage": _usage(tokens)})
    yield "[DONE]"


def _head(number: int, kind: str) -> Message:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": MODEL}


def _usage(tokens: list[int]) -> dict[str, int]:
    prompt, answer = tokens
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _finish(message: Message, finish: str) -> str:
    return "tool_calls" if finish == "stop" and "tool_calls" in message else finish
