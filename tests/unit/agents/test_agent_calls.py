"""Tool calls in model output, compared with SGLang's parsers of the same formats, and model-written programs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mrl.agents.tool_call_parsers import PARSERS, ToolCall, convert_argument, declared_types, load_parser
from mrl.config.checks import agent as checked
from mrl.user_functions import FunctionError
from tests.helpers.tool_calls import TEXTS, TOOLS, Text


@pytest.mark.parametrize("given", TEXTS, ids=lambda given: given.parser)
def test_calls_are_read_and_what_cannot_be_read_is_told(given: Text) -> None:
    read = PARSERS[given.parser](given.text, TOOLS)
    assert read.calls == given.calls
    assert re.search(given.error, read.error) if given.error else not read.error
    assert not given.error or "cannot be read at line" in read.error


def test_the_text_around_calls_is_what_a_harness_gets_as_content() -> None:
    for parser, text, content in (
        (
            "hermes",
            'a <tool_call>{"name": "f"}</tool_call> b <tool_call>{</tool_call>',
            "a  b <tool_call>{</tool_call>",
        ),
        ("deepseek_v31", TEXTS_BY_PARSER["deepseek_v31"], ""),
        ("kimi_k2", "so " + TEXTS_BY_PARSER["kimi_k2"], "so"),
        ("gpt_oss", "<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>hello", "hello"),
        ("fenced", "so\n```python\n1\n```\nend", "so\nend"),
    ):
        assert PARSERS[parser](text, TOOLS).content == content


TEXTS_BY_PARSER = {given.parser: given.text for given in reversed(TEXTS)}


@pytest.mark.parametrize(
    ("text", "calls", "error"),
    [
        ("so\n```python\nprint(1)\n```\nand\n```\nls\n```", [("python", "print(1)\n"), ("code", "ls\n")], ""),
        ("````md\n```\nx\n```\n````", [("md", "```\nx\n```\n")], ""),
        ('```python\ns = """\n```python\n"""\n```', [("python", 's = """\n```python\n"""\n')], ""),
        ("* so\n  ~~~c++ main.cc\n  int\n    x;\n  ~~~", [("c++", "int\n  x;\n")], ""),
        ("```x = 1``` is code in a line", [], ""),
        ("```sh\na\u2028  ```\n```", [("sh", "a\u2028  ```\n")], ""),
        ("```sh\nls\n```\n```python\nprint(1)", [("sh", "ls\n")], "line 4, column 1: a block of code is not closed"),
        ("<think>\n```sh\nrm\n```\n</think>\n```sh\nls\n```", [("sh", "ls\n")], ""),
    ],
)
def test_blocks_of_code(text: str, calls: list[tuple[str, str]], error: str) -> None:
    read = PARSERS["fenced"](text, ())
    assert [(call.name, call.arguments["code"]) for call in read.calls] == calls
    assert error in read.error if error else not read.error


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": [1, None]}, {"integer", "null"}),
        ({"const": "a"}, {"string"}),
        ({"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/Word"}]}, {"integer", "string"}),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "string"}]}, {"string"}),
        ({"anyOf": [{"type": "integer"}, {"description": "or whatever"}]}, None),
        ({"properties": {}}, {"object"}),
        ({"$ref": "#/$defs/Loop"}, None),
        ({"$ref": "elsewhere.json"}, None),
        (True, None),
        ({}, None),
    ],
)
def test_declared_types(schema: Any, types: set[str] | None) -> None:
    definitions = {"Word": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": definitions}
    for tool in ({"name": "f", "parameters": parameters}, {"function": {"name": "f", "parameters": parameters}}):
        assert declared_types([tool], "f", "x") == types
    assert declared_types([tool], "f", "y") is None and declared_types([tool], "g", "x") is None


def test_a_value_without_a_declaration_is_text() -> None:
    assert [convert_argument(text, None) for text in ("1_000", "null", "[1]", "True")] == [
        "1_000",
        "null",
        "[1]",
        "True",
    ]


OWN = """
def braces(text, tools):
    if text.count("{") != text.count("}"):
        raise ValueError("close your braces")
    return [(part.partition("}")[0], {"known": len(tools)}) for part in text.split("{")[1:]]

def wrong(text, tools):
    return ["f"]

def of_text_alone(text):
    return []

def nan(text, tools):
    return [("f", {"x": float("nan")})]
"""


def test_a_parser_may_be_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    parser = load_parser(f"{file}:braces")
    assert parser("{a} and {b}", TOOLS).calls == (ToolCall("a", {"known": 2}), ToolCall("b", {"known": 2}))
    assert parser("{a", TOOLS).error == "close your braces"
    assert "not JSON compliant" in load_parser(f"{file}:nan")("x", ()).error
    with pytest.raises(TypeError, match="expected .name, arguments by name."):
        load_parser(f"{file}:wrong")("x", ())
    with pytest.raises(FunctionError, match="must take .text, tools."):
        load_parser(f"{file}:of_text_alone")
    with pytest.raises(FunctionError, match="agent.parser .*defines no 'brace'"):
        load_parser(f"{file}:brace")


def test_an_error_of_several_lines_is_told_whole(tmp_path: Path) -> None:
    file = tmp_path / "fails.py"
    file.write_text('raise KeyError("first\\nsecond")\n')
    with pytest.raises(FunctionError, match=r"failed: KeyError: 'first.nsecond' \(line 1\)"):
        load_parser(f"{file}:parse")
    file = tmp_path / "fails_too.py"  # a new name, or Python would run its cached bytecode
    file.write_text('raise RuntimeError("first\\n\\n")\n')
    with pytest.raises(FunctionError, match=r"failed: RuntimeError: first \(line 1\)"):
        load_parser(f"{file}:parse")


def test_the_checks_know_every_parser() -> None:
    assert checked.PARSERS == tuple(PARSERS)
