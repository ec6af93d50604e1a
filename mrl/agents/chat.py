"""Chat completion requests of harnesses (OpenAI's /v1/chat/completions), and the answers. Standard library only.

This is the internal form of all requests: `anthropic_messages` and `openai_responses` translate theirs to it.

The run's configuration decides how turns are sampled: the parameters in THE_RUNS are accepted and ignored. Every other
parameter that would change the answer (several choices, stop words, biases, penalties, a forced format) is refused by
name, and so is every unknown one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
TEXT_PARTS = ("text", "input_text", "output_text")

NOT_CONSTRAINED = "the output of the model is not constrained"
THOUGHTS = "the run decides how the model thinks"
STOPS = "set rollout.sampling.stop of the run instead"
RECORDED = "they are recorded for the trainer"
_BIASED = "training uses the log-probs of the run's sampling parameters"
Rules = tuple[tuple[str, tuple[Any, ...], str], ...]  # field, its only accepted values, why
RULES: Rules = (
    ("n", (1,), "a trajectory has one response per request"),
    ("stop", ([], ""), STOPS),
    ("tool_choice", ("auto", "none"), NOT_CONSTRAINED),
    ("response_format", ({"type": "text"},), NOT_CONSTRAINED),
    ("functions", ([],), "use tools"),
    ("function_call", ("auto", "none"), "use tools and tool_choice"),
    ("parallel_tool_calls", (True,), NOT_CONSTRAINED),
    ("logprobs", (False,), RECORDED),
    ("top_logprobs", (0,), RECORDED),
    ("logit_bias", ({},), _BIASED),
    ("presence_penalty", (0,), _BIASED),
    ("frequency_penalty", (0,), _BIASED),
    ("repetition_penalty", (1,), _BIASED),
    ("modalities", (["text"],), "the model generates text"),
)


class BadChat(ValueError):
    """A request that cannot be answered. param: name of the field; status: of HTTP"""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclass(frozen=True)
class ChatRequest:
    """Parsed request. messages: normalised; has_stream: the answer comes as events; with_usage: with token counts"""

    messages: list[Message]
    tools: list[Message]
    has_stream: bool
    with_usage: bool = False

    @property
    def question(self) -> Message:
        """Question to rank 0."""
        return {"messages": self.messages, "tools": self.tools}


@dataclass(frozen=True)
class Answer:
    """A turn of the model. number: from 1; finish: "stop" or "length"; tokens: numbers in the prompt and the answer"""

    number: int
    message: Message
    finish: str
    tokens: list[int]


def parse_request(body: Any) -> ChatRequest:
    """Parses a request body. Raises BadChat, which names the field and the problem."""
    messages = listed(body, "messages")
    refuse(body, {*READ, *THE_RUNS, *SAYS_NOTHING}, RULES)
    stream = body.get("stream_options")
    return ChatRequest(
        [_message(each, f"messages[{i}]") for i, each in enumerate(messages)],
        declared_tools(body, _tool),
        bool(body.get("stream")),
        isinstance(stream, dict) and bool(stream.get("include_usage")),
    )


def listed(body: Any, name: str) -> list[Any]:
    """Returns the messages or items of a request body. Raises BadChat."""
    if not isinstance(body, dict):
        raise BadChat("the body must be a JSON object")
    found = body.get(name)
    if not isinstance(found, list) or not 0 < len(found) <= MAX_MESSAGES:
        raise BadChat(f"{name} must be a list of 1 to {MAX_MESSAGES} {name}", name)
    return found


def refuse(body: Mapping[str, Any], known: Iterable[str], rules: Rules = ()) -> None:
    """Raises BadChat for a field that breaks one of the `rules`, and for one that is not in them and not `known`."""
    for name, only, why in rules:
        if body.get(name) is not None and not any(body[name] == value for value in only):
            raise BadChat(f"{name} is {strict_json.dumps(body[name])[:80]}, which is not supported: {why}", name)
    unknown = body.keys() - {*known, *(name for name, _, _ in rules)}
    if first := min((name for name in unknown if body[name] is not None), default=""):
        raise BadChat(f"{first[:80]} is not supported: leave it out", first[:80])


def declared_tools(body: Mapping[str, Any], parse: Callable[[Any, str], Message]) -> list[Message]:
    """Returns the tools of a request as `parse` reads each; none if tool_choice forbids calls. Raises BadChat."""
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise BadChat("tools must be a list", "tools")
    found = [parse(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    return [] if body.get("tool_choice") in ("none", {"type": "none"}) else found


def _tool(tool: Any, where: str) -> Message:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadChat(f"{where} must be {{'type': 'function', 'function': {{'name': ...}}}}", where)
    return dict(tool)


def _message(message: Any, where: str) -> Message:
    """Normalises a message: text content and no empty keys, so that an answer is recognised when it is sent back."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise BadChat(f"{where} must be an object with a role of {', '.join(ROLES)}", f"{where}.role")
    found: Message = {"role": message["role"], "content": text_of(message.get("content"), f"{where}.content")}
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


def text_of(content: Any, where: str) -> str:
    """Returns content as text: of its parts, one after the other. Raises BadChat for parts of another kind."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadChat(f"{where} must be text, or a list of parts", where)
    parts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise BadChat(f"{where}[{i}] must be text: other parts are not supported", f"{where}[{i}]")
        parts.append(part["text"])
    return "".join(parts)


def _call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadChat(f"{where} must be {{'id': ..., 'type': 'function', 'function': ...}}", where)
    return tool_call(call.get("id", ""), function.get("name"), function.get("arguments"), f"{where}.function")


def tool_call(call_id: Any, name: Any, arguments: Any, where: str) -> Message:
    """Returns a call in the internal form. arguments: an object, or its JSON text. Raises BadChat."""
    if not isinstance(name, str):
        raise BadChat(f"{where}.name must be text", f"{where}.name")
    if isinstance(arguments, str):
        try:
            arguments = strict_json.loads(arguments or "{}")
        except ValueError as error:
            raise BadChat(f"{where}.arguments is not JSON: {error}", f"{where}.arguments") from None
    if not isinstance(arguments, dict):
        raise BadChat(f"{where}.arguments must be a JSON object", f"{where}.arguments")
    return {"id": str(call_id), "type": "function", "function": {"name": name, "arguments": arguments}}


def joined(messages: list[Message]) -> list[Message]:
    """Returns the messages with those of the same role that follow one another as one, except results of tools."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else {}
        if last.get("role") != message["role"] or message["role"] == "tool":
            found.append(message)
            continue
        found[-1] = {**last, "content": last["content"] + message["content"]}
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            found[-1]["tool_calls"] = calls
    return found


def openai_message(message: Message) -> Message:
    """Returns a message in the form of OpenAI's API: arguments of calls are text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": strict_json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def completion(answer: Answer, asked: ChatRequest) -> Message:
    """Returns the answer as one object."""
    choice = {"index": 0, "message": openai_message(answer.message), "finish_reason": _finish(answer), "logprobs": None}
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def events(answer: Answer, asked: ChatRequest) -> Iterator[Message | str]:
    """Yields the answer's events."""
    head, delta = _head(answer, "chat.completion.chunk"), openai_message(answer.message)
    if "tool_calls" in delta:
        delta = {**delta, "tool_calls": [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]}
    yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish(answer)}]}
    if asked.with_usage:
        yield {**head, "choices": [], "usage": _usage(answer)}
    yield "[DONE]"


def _head(answer: Answer, kind: str) -> Message:
    return {"id": f"chatcmpl-{answer.number}", "object": kind, "created": int(time.time()), "model": MODEL}


def _usage(answer: Answer) -> dict[str, int]:
    prompt, generated = answer.tokens
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _finish(answer: Answer) -> str:
    return "tool_calls" if answer.finish == "stop" and "tool_calls" in answer.message else answer.finish


def error_body(error: BadChat) -> Message:
    """Returns the body of an error in the form of OpenAI's API."""
    kind = "authentication_error" if error.status == 401 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
