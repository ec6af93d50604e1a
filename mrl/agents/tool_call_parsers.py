"""Tool calls in a turn of the model, parsed by a cursor. Standard library only: environments' processes import it.

A built-in parser accounts for every character of a call. Text that violates the format's grammar (leftover text, a
repeated parameter, two functions in one call, an unclosed call) is an error with its line, column and reason, which the
program can pass to the model; the other calls of the turn are kept. If a format writes values as plain text, their
types come from the tools' schemas. Calls inside of <think>...</think> are not calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mrl import strict_json, user_functions

KEY = "agent.parser"
Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": JSON schema}}
MAX_DEPTH = 32  # of references and unions in a schema
_KINDS: dict[type, str] = {
    **{type(None): "null", bool: "boolean", int: "integer", float: "number"},
    **{str: "string", list: "array", dict: "object"},
}
SHOWN_ERRORS = 4  # of one turn
THOUGHTS, ANSWER = "<think>", "</think>"
_GLM_NAME = re.compile(r"\s*([^\s<>]+)\s*(?=<arg_key>|</tool_call>)")


class BadToolCall(ValueError):
    """Raised for a call that cannot be read, with the reason for the model. at: index in the text"""

    def __init__(self, why: str, at: int) -> None:
        super().__init__(why)
        self.at = at


@dataclass(frozen=True)
class ToolCall:
    """Call of the tool `name` with arguments by name."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParsedCalls:
    """A parsed turn. error: why calls could not be read, empty if all could; content: the text around the calls"""

    calls: tuple[ToolCall, ...]
    error: str
    content: str


Parser = Callable[[str, Sequence[Tool]], ParsedCalls]


@dataclass
class Cursor:
    """Position in a text, which advances as the text is read. Methods raise BadToolCall if the text does not match."""

    text: str
    at: int

    def skip_space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def has(self, literal: str) -> bool:
        """Returns True and moves behind the literal if it is next; otherwise returns False."""
        if found := self.text.startswith(literal, self.at):
            self.at += len(literal)
        return found

    def expect(self, literal: str, hint: str = "") -> None:
        """Moves behind white space and the literal."""
        self.skip_space()
        if not self.has(literal):
            raise BadToolCall(f"expected {literal}, found {self.here()}{hint}", self.at)

    def here(self) -> str:
        """Returns the next characters, for messages."""
        return repr(self.text[self.at : self.at + 24]) if self.at < len(self.text) else "the end of the turn"

    def until(self, end: str, *never: str) -> str:
        """Returns the text before `end`, which none of `never` may precede, and moves behind it. Raises BadToolCall."""
        after = self.text.find(end, self.at)
        found = self.text[self.at : after if after >= 0 else len(self.text)]
        for literal in never:
            if (place := found.find(literal)) >= 0:
                raise BadToolCall(f"expected {end} before {literal}", self.at + place)
        if after < 0:
            raise BadToolCall(f"not closed: {end} is missing", self.at)
        self.at = after + len(end)
        return found

    def name(self, end: str, *never: str) -> str:
        """Returns a name without white space before `end`, and moves behind it. Raises BadToolCall."""
        at = self.at
        name = self.until(end, *never).strip()
        if not name or re.search(r"[\s<>]", name):
            raise BadToolCall(f"{name[:40]!r} is no name", at)
        return name

    def object(self, what: str) -> dict[str, Any]:
        """Returns a JSON object, and moves behind it. Raises BadToolCall."""
        self.skip_space()
        at = self.at
        try:
            value, self.at = strict_json.raw_decode(self.text, at)
        except json.JSONDecodeError as error:
            raise BadToolCall(f"{what} must be JSON: {error.msg}", error.pos) from None
        if not isinstance(value, dict):
            raise BadToolCall(f"{what} must be a JSON object", at)
        return value


@dataclass(frozen=True)
class CallSyntax:
    """Syntax of calls. open, close: around a call; body: parses the text between them; section: markers around all
    calls of a turn; stray: markers that never stand outside of a call
    """

    open: str
    close: str
    body: Callable[[Cursor, Sequence[Tool]], ToolCall]
    section: tuple[()] | tuple[str, str] = ()
    stray: tuple[str, ...] = ()


def _hermes(cursor: Cursor, tools: Sequence[Tool]) -> ToolCall:
    at = cursor.at
    content = cursor.object('a call {"name": "...", "arguments": {...}}')
    name, arguments = content.get("name"), content.get("arguments", {})
    if unknown := sorted(content.keys() - {"name", "arguments"}):
        raise BadToolCall(f'a call has the keys "name" and "arguments", not {unknown[0]!r}', at)
    if not isinstance(name, str) or not name:
        raise BadToolCall('"name" must be the name of a tool', at)
    if isinstance(arguments, str):  # some models write the arguments as the text of JSON
        try:
            arguments = strict_json.loads(arguments)
        except ValueError as error:
            raise BadToolCall(f'"arguments" must be a JSON object: {error}', at) from None
    if not isinstance(arguments, dict):
        raise BadToolCall('"arguments" must be a JSON object', at)
    return ToolCall(name, arguments)


def _qwen3_coder(cursor: Cursor, tools: Sequence[Tool]) -> ToolCall:
    cursor.expect("<function=")
    name, arguments = cursor.name(">"), dict[str, Any]()
    while True:
        cursor.skip_space()
        if cursor.has("</function>"):
            return ToolCall(name, arguments)
        hint = " or </function>; a value cannot hold </parameter>" if arguments else " or </function>"
        cursor.expect("<parameter=", hint)
        at = cursor.at
        key = cursor.name(">")
        value = cursor.until("</parameter>", "<parameter=").removeprefix("\n").removesuffix("\n")
        _add(arguments, name, key, value, tools, at)


def _glm45(cursor: Cursor, tools: Sequence[Tool]) -> ToolCall:
    begins = _GLM_NAME.match(cursor.text, cursor.at)
    if begins is None:
        raise BadToolCall("a call begins with the name of a tool, before <arg_key> or </tool_call>", cursor.at)
    name, arguments = begins[1], dict[str, Any]()
    cursor.at = begins.end()
    while True:
        cursor.skip_space()
        if not cursor.has("<arg_key>"):
            return ToolCall(name, arguments)
        at = cursor.at
        key = cursor.name("</arg_key>")
        cursor.expect("<arg_value>")
        _add(arguments, name, key, cursor.until("</arg_value>", "<arg_key>"), tools, at)


def _add(arguments: dict[str, Any], name: str, key: str, value: str, tools: Sequence[Tool], at: int) -> None:
    if key in arguments:
        raise BadToolCall(f"the parameter {key!r} is there twice", at)
    try:
        arguments[key] = convert_argument(value, declared_types(tools, name, key))
    except ValueError as error:
        raise BadToolCall(f"the parameter {key!r} of {name!r}: {error}", at) from None


def _deepseek_v3(cursor: Cursor, tools: Sequence[Tool]) -> ToolCall:
    cursor.expect("function")
    cursor.expect("<｜tool▁sep｜>")
    name = cursor.name("\n", "<｜")
    cursor.expect("```json")
    arguments = cursor.object("arguments")
    cursor.expect("```")
    return ToolCall(name, arguments)


def _deepseek_v31(cursor: Cursor, tools: Sequence[Tool]) -> ToolCall:
    return ToolCall(cursor.name("<｜tool▁sep｜>", "<｜tool▁call"), cursor.object("arguments"))


def _kimi_k2(cursor: Cursor, tools: Sequence[Tool]) -> ToolCall:
    at = cursor.at
    name, _, number = cursor.name("<|tool_call_argument_begin|>", "<|tool_call_end|>").rpartition(":")
    name = name.removeprefix("functions.")
    if not name or not number.isdecimal():
        raise BadToolCall("a call begins with functions.NAME:NUMBER", at)
    return ToolCall(name, cursor.object("arguments"))


_TAGS = "<tool_call>", "</tool_call>"
_DEEPSEEK = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
FORMATS = {
    "hermes": CallSyntax(*_TAGS, _hermes),
    "qwen3_coder": CallSyntax(*_TAGS, _qwen3_coder, stray=("<function=", "</function>")),
    "glm45": CallSyntax(*_TAGS, _glm45, stray=("<arg_key>", "<arg_value>")),
    "deepseek_v3": CallSyntax(*_DEEPSEEK, _deepseek_v3, _DEEPSEEK_SECTION, ("<｜tool▁sep｜>",)),
    "deepseek_v31": CallSyntax(*_DEEPSEEK, _deepseek_v31, _DEEPSEEK_SECTION, ("<｜tool▁sep｜>",)),
    "kimi_k2": CallSyntax(
        *("<|tool_call_begin|>", "<|tool_call_end|>", _kimi_k2),
        *(("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), ("<|tool_call_argument_begin|>",)),
    ),
}
Span = tuple[int, int]
Read = tuple[list[ToolCall], list[Span], list[BadToolCall]]  # spans: of the text that is not content


def _read_format(form: CallSyntax, text: str, start: int, tools: Sequence[Tool]) -> Read:
    """Reads the calls of text[start:]."""
    begin, end = form.section or ("", "")
    marks = [mark for mark in (form.open, form.close, begin, end, *form.stray) if mark]
    calls, spans, errors = list[ToolCall](), list[Span](), list[BadToolCall]()
    section: int | None = None  # where it was opened
    at = start
    while True:
        places = [(place, mark) for mark in marks if (place := text.find(mark, at)) >= 0]
        place, mark = min(places, default=(len(text), ""))
        if section is not None and (between := text[at:place].strip()):
            errors.append(BadToolCall(f"{between[:24]!r} stands between calls", at))
        if not mark:
            if section is not None:
                errors.append(BadToolCall(f"not closed: {end} is missing", section))
            return calls, spans, errors
        at = place + len(mark)
        if mark in (begin, end):
            spans.append((place, at))
            if (mark == begin) == (section is not None):
                errors.append(BadToolCall(f"{mark} does not belong here", place))
            section = place if mark == begin else None
        elif mark != form.open:
            errors.append(BadToolCall(f"{mark} stands outside of a call, which begins with {form.open}", place))
            if mark != form.close and (close := text.find(form.close, at)) >= 0:
                at = close + len(form.close)
        else:
            cursor = Cursor(text, at)
            try:
                call = form.body(cursor, tools)
                cursor.expect(form.close)
                calls.append(call)
                spans.append((place, cursor.at))
            except BadToolCall as error:
                errors.append(error)
                if not text.startswith(form.open, cursor.at):  # else the next call begins where this one failed
                    close = text.find(form.close, cursor.at)
                    cursor.at = len(text) if close < 0 else close + len(form.close)
            at = cursor.at


def _read_fenced(text: str, start: int, tools: Sequence[Tool]) -> Read:
    """Parses blocks of code as in CommonMark: a closing fence, alone on its line, is not shorter than the opening."""
    calls, spans = list[ToolCall](), list[Span]()
    opened: tuple[int, str, int, str] | None = None  # place, signs, indent, language
    code: list[str] = []
    at = start
    for line in re.findall(r"[^\n]*\n|[^\n]+", text[start:]):
        bare = line.strip()
        signs = re.match(r"`{3,}(?!.*`)|~{3,}", bare)
        if opened is None and signs is not None:
            language = bare[signs.end() :].split()[:1]
            opened = at, signs[0], len(line) - len(line.lstrip(" \t")), language[0].lower() if language else "code"
            code = []
        elif opened is not None:
            begin, fence, indent, language_name = opened
            if bare.startswith(fence) and not bare.strip(fence[0]):
                calls.append(ToolCall(language_name, {"code": "".join(code)}))
                spans.append((begin, at + len(line)))
                opened = None
            else:
                code.append(line[min(indent, len(line) - len(line.lstrip(" \t"))) :])
        at += len(line)
    why = f"a block of code is not closed: end it with {opened[1]}" if opened else ""
    return calls, spans, [BadToolCall(why, opened[0])] if opened else []


def _apart(read: Callable[[str, int, Sequence[Tool]], Read], text: str, tools: Sequence[Tool]) -> ParsedCalls:
    """Parses the text after the model's thoughts. A lone </think> that is not part of a call closes thoughts, too: a
    chat template may have opened them."""
    end = text.find(ANSWER)
    after = len(text) if end < 0 else end + len(ANSWER)
    calls, spans, errors = read(text, after if text.lstrip().startswith(THOUGHTS) else 0, tools)
    if end >= 0 and THOUGHTS not in text[:end] and not any(first <= end < last for first, last in spans):
        calls, spans, errors = read(text, after, tools)
    content, at = "", 0
    for first, last in spans:
        content, at = content + text[at:first], last
    return ParsedCalls(tuple(calls), _described(text, errors), (content + text[at:]).strip())


def _described(text: str, errors: list[BadToolCall]) -> str:
    """Returns the first errors with their places, for the model."""
    shown = []
    for error in errors[:SHOWN_ERRORS]:
        before = text[: error.at]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        shown.append(f"a call cannot be read at line {line}, column {column}: {error}")
    if len(errors) > SHOWN_ERRORS:
        shown.append(f"{len(errors) - SHOWN_ERRORS} more cannot be read")
    return "; ".join(shown)


def _gpt_oss(text: str, tools: Sequence[Tool]) -> ParsedCalls:
    """Parses OpenAI's harmony format: HEADER<|message|>BODY and <|end|>, <|call|> or <|return|>. The header of a call
    has to=functions.NAME; the content is that of the channels final and commentary.
    """
    calls, errors, content = list[ToolCall](), list[BadToolCall](), list[str]()
    cursor = Cursor(text, 0)
    while cursor.at < len(text):
        header_at, message = cursor.at, text.find("<|message|>", cursor.at)
        header = text[header_at : message if message >= 0 else len(text)]
        words = re.sub(r"<\|(start|channel|constrain)\|>", r" <\1> ", header).split()
        to = [word.removeprefix("to=") for word in words if word.startswith("to=")]
        if message < 0:
            if "<channel>" in words or to:
                errors.append(BadToolCall("not closed: <|message|> is missing", header_at))
            else:
                content.append(header)
            break
        cursor.at = message + len("<|message|>")
        ends = [(at, end) for end in ("<|end|>", "<|call|>", "<|return|>") if (at := text.find(end, cursor.at)) >= 0]
        end_at, end = min(ends, default=(len(text), ""))
        if not to:
            channel = words[words.index("<channel>") + 1 :][:1] if "<channel>" in words else []
            content += [text[cursor.at : end_at]] if channel in ([], ["final"], ["commentary"]) else []
        else:
            try:
                if len(to) > 1 or not to[0].startswith("functions.") or to[0] == "functions.":
                    raise BadToolCall(
                        f"a call is to one function, to=functions.NAME, not to={' to='.join(to)}", header_at
                    )
                arguments = cursor.object("arguments")
                cursor.skip_space()
                if cursor.at < len(text) and not cursor.has("<|call|>"):
                    raise BadToolCall(f"expected <|call|>, found {cursor.here()}", cursor.at)
                calls.append(ToolCall(to[0].removeprefix("functions."), arguments))
                continue
            except BadToolCall as error:
                errors.append(error)
        cursor.at = end_at + len(end)
    return ParsedCalls(tuple(calls), _described(text, errors), "\n".join(content).strip())


PARSERS: dict[str, Parser] = {
    **{name: partial(_apart, partial(_read_format, form)) for name, form in FORMATS.items()},
    "gpt_oss": _gpt_oss,
    "fenced": partial(_apart, _read_fenced),
}
# Their markers are special tokens in some tokenizers: these parsers read a turn with its special tokens in it.
WITH_SPECIAL_TOKENS = ("deepseek_v3", "deepseek_v31", "kimi_k2", "gpt_oss")


def load_parser(name: str) -> Parser:
    """Returns a built-in parser, or the user's in path/to/file.py:name: a function of the text and the tools that
    returns (name, arguments) of each call and may raise ValueError, whose text goes to the model. Raises
    FunctionError.
    """
    if name in PARSERS:
        return PARSERS[name]
    own = user_functions.load(name, KEY, ("", []), "(text, tools)")

    def parse(text: str, tools: Sequence[Tool]) -> ParsedCalls:
        try:
            return ParsedCalls(tuple(_checked(own(text, tools), name)), "", text)
        except ValueError as error:
            return ParsedCalls((), str(error) or "a call cannot be read", text)

    return parse


def _checked(found: Iterable[Any], name: str) -> Iterable[ToolCall]:
    for each in found:
        is_pair = isinstance(each, tuple) and len(each) == 2
        if not is_pair or not isinstance(each[0], str) or not isinstance(each[1], Mapping):
            raise TypeError(f"{KEY} {name!r} gave {each!r}, expected (name, arguments by name)")
        # ValueError: the model's mistake, such as NaN; TypeError: the parser's, such as an object that is no JSON
        strict_json.dumps(dict(each[1]), ensure_ascii=False).encode()
        yield ToolCall(each[0], dict(each[1]))


# ---- types of arguments: `type`, `enum`, `const`, `anyOf`, `oneOf`, `allOf` and local `$ref` of a tool's `parameters`


def declared_types(tools: Sequence[Tool], name: str, parameter: str) -> set[str] | None:
    """Returns the JSON types that the tool `name` declares for a parameter; None if it declares none."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            root = function.get("parameters")
            schema = root if isinstance(root, Mapping) else {}
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and parameter in properties:
                return _types(properties[parameter], schema)
            return _types(schema.get("additionalProperties"), schema)
    return None


def convert_argument(text: str, types: set[str] | None) -> Any:
    """Returns the value of `text`: the text itself if no type or a string is declared, else strict JSON.

    `null` is null wherever null is declared. True, False and None are read for boolean and null, since chat templates
    show them in earlier turns. Raises ValueError if the value has none of the types.
    """
    if types is None:
        return text
    if "null" in types and text == "null":
        return None
    if "string" in types:
        return text
    word = text.strip()
    if "boolean" in types and word in ("True", "False"):
        return word == "True"
    if "null" in types and word == "None":
        return None
    wanted = " or ".join(sorted(types))
    try:
        value = strict_json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text[:40]!r} is not JSON of type {wanted}: {error.msg}") from None
    if "integer" in types and "number" not in types and isinstance(value, float) and value.is_integer():
        return int(value)
    kind = _KINDS[type(value)]
    if kind not in types and not (kind == "integer" and "number" in types):
        raise ValueError(f"{text[:40]!r} is of type {kind}, expected {wanted}")
    return value


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str] | None:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return None
    if isinstance(ref := schema.get("$ref"), str):
        return _types(_referenced(root, ref), root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)} or None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {_KINDS[type(value)] for value in values if type(value) in _KINDS} or None
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list):
            found = [_types(part, root, depth + 1) for part in parts]
            known = [types for types in found if types is not None]
            if key == "allOf":
                return set.intersection(*known) or None if known else None
            return set[str]().union(*known) if known and len(known) == len(found) else None
    return {"object"} if "properties" in schema else {"array"} if "items" in schema else None


def _referenced(root: Any, ref: str) -> Any:
    """Returns the part of a schema that a local reference such as #/$defs/City names; None if there is none."""
    found = root if ref.startswith("#") else None
    for part in filter(None, ref.lstrip("#").split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
