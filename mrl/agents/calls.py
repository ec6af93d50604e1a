"""Calls of tools in what a model has said. The standard library only: environments' processes read them.

A parser gives the calls of a text in their order, none where there are none, and raises BadCall, which the program may
tell the model, for one that cannot be read.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mrl import user_functions

KEY = "agent.parser"
_TAGGED = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


class BadCall(ValueError):
    """A call that cannot be read; the message is for the model."""


@dataclass(frozen=True)
class Call:
    """What is called, and with which arguments by name."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


Parser = Callable[[str], list[Call]]


def hermes(text: str) -> list[Call]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen 2.5, Qwen 3 and Hermes have it."""
    return [_of_json(inner) for inner in _tagged(text)]


def qwen3_coder(text: str) -> list[Call]:
    """<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>. Values are what JSON or
    Python makes of them, and else text."""
    return [_of_xml(inner) for inner in _tagged(text)]


def fenced(text: str) -> list[Call]:
    """Every fenced block of code as a call of its language ("code" where it names none), with the argument "code"."""
    found = []
    for language, code, end in _FENCED.findall(text):
        if not end:
            raise BadCall("a block of code is not closed: end it with ```")
        found.append(Call(language.lower() or "code", {"code": code}))
    return found


PARSERS: dict[str, Parser] = {"hermes": hermes, "qwen3_coder": qwen3_coder, "fenced": fenced}


def load_parser(name: str) -> Parser:
    """A built-in one, or path/to/file.py:name: a function of the text that gives (name, arguments) of each call and may
    raise ValueError, which is told to the model. Raises FunctionError."""
    if name in PARSERS:
        return PARSERS[name]
    own = user_functions.load(name, KEY, ("",), "(text)")
    return lambda text: _checked(own, text, name)


def _checked(own: Callable[[str], Iterable[Any]], text: str, name: str) -> list[Call]:
    try:
        found = list(own(text))
    except ValueError as error:
        raise BadCall(str(error)) from error
    for each in found:
        is_pair = isinstance(each, tuple) and len(each) == 2
        if not is_pair or not isinstance(each[0], str) or not isinstance(each[1], Mapping):
            raise TypeError(f"{KEY} {name!r} gave {each!r}, expected (name, arguments by name)")
        json.dumps(dict(each[1]))  # as an endpoint sends it
    return [Call(called, dict(arguments)) for called, arguments in found]


def _tagged(text: str) -> list[str]:
    found = _TAGGED.findall(text)
    if any(not end for _, end in found):
        raise BadCall("a call is not closed: end it with </tool_call>")
    return [inner for inner, _ in found]


def _of_json(inner: str) -> Call:
    try:
        call = json.loads(inner)
        name, arguments = call["name"], call.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        name = arguments = None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise BadCall('a call must be JSON of {"name": "...", "arguments": {...}}')
    return Call(name, arguments)


def _of_xml(inner: str) -> Call:
    match = _FUNCTION.fullmatch(inner)
    if match is None:
        raise BadCall("a call must be <function=NAME><parameter=KEY>value</parameter></function>")
    return Call(match[1], {key: _value(text) for key, text in _PARAMETER.findall(match[2])})


def _value(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
            json.dumps(found)
            return found
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return text
