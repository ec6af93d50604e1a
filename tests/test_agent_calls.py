"""Tool calls in what a model says, beside SGLang's parsers of the same formats; programs that the model has run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mrl.agents.argument_types import convert_argument, declared_types
from mrl.agents.tool_call_parsers import PARSERS, ToolCall, load_parser
from mrl.config.checks import agent as checked
from mrl.core import Request
from mrl.reward.sandbox import find_sandbox
from mrl.rollout.sglang.command import SHIM
from mrl.user_functions import FunctionError
from tests.test_agents import FakeEngine, play
from tests.tool_calls import TEXTS, TOOLS, Text

ROOT = Path(__file__).parent.parent
IN_SGLANG = {"glm45": "glm45", "deepseek_v3": "deepseekv3", "deepseek_v31": "deepseekv31", "gpt_oss": "gpt-oss"}
ASKS_SGLANG = """
import json, logging, sys
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
logging.disable(logging.CRITICAL)
tools, texts = json.load(sys.stdin)
tools = [Tool.model_validate(tool) for tool in tools]
for name, text in texts:
    try:
        calls = FunctionCallParser(tools, name).parse_non_stream(text)[1]
        print(json.dumps([[call.name, json.loads(call.parameters)] for call in calls]))
    except ValueError:
        print("null")
"""


@pytest.mark.parametrize("given", TEXTS, ids=lambda given: given.parser)
def test_calls_are_read_and_what_cannot_be_read_is_told(given: Text) -> None:
    read = PARSERS[given.parser](given.text, TOOLS)
    assert read.calls == given.calls
    assert re.search(given.error, read.error) if given.error else not read.error
    assert not given.error or "cannot be read at line" in read.error


def test_where_sglang_reads_the_same_calls() -> None:
    """docs/agents.md says where the two differ and why."""
    texts = [(IN_SGLANG.get(given.parser, given.parser), given.text) for given in TEXTS]
    done = subprocess.run(
        [sys.executable, "-c", ASKS_SGLANG],
        env={**os.environ, "PYTHONPATH": f"{SHIM}:{ROOT}"},
        input=json.dumps([TOOLS, texts]),
        **{"capture_output": True, "text": True, "timeout": 120},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()[-len(TEXTS) :]]
    for given, answer in zip(TEXTS, answers, strict=True):
        calls = None if answer is None else tuple(ToolCall(name, arguments) for name, arguments in answer)
        assert (calls == given.calls) is given.same, (given, calls)


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
    file.write_text('raise RuntimeError("first\\n\\n")\n')
    with pytest.raises(FunctionError, match=r"failed: RuntimeError: first \(line 1\)"):
        load_parser(f"{file}:parse")


PROGRAM = """
async def uses_python(ctx, prompt):
    outputs = []
    while True:
        turn = await ctx.generate()
        if not turn.calls and not turn.call_error:
            return {"score": float(outputs == ["42\\n", "signal", "closed"]), "calls": len(outputs)}
        for call in turn.calls:
            ended = await ctx.sandbox(call.arguments["code"])
            outputs.append(ended.stdout if ended.ok else "signal")
        if turn.call_error:
            outputs.append("closed")
        ctx.say("!")
"""


@pytest.mark.skipif(find_sandbox()[1] is not None, reason=f"programs cannot be shut in here: {find_sandbox()[1]}")
def test_a_program_of_the_model_is_run_shut_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tools.py"
    file.write_text(PROGRAM)
    texts = ["```python\nprint(6 * 7)\n```", "```python\nwhile True: pass\n```", "```python\nx", "done"]
    turn = 0

    def said(self: FakeEngine, request: Request) -> str:
        nonlocal turn
        turn += 1
        return texts[turn - 1]

    monkeypatch.setattr(FakeEngine, "says", said)
    [sample] = play(file, "uses_python", count=1, parser="fenced", sandbox={"wall_s": 1.0})
    assert sample.environment == {"score": 1.0, "calls": 3.0}


def test_a_program_gets_typed_calls_and_what_could_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools' declarations are the row's; the good call of a turn is kept beside one that is none."""
    file = tmp_path / "typed.py"
    file.write_text(
        "async def typed(ctx, prompt):\n"
        "    turn = await ctx.generate()\n"
        "    [call] = turn.calls\n"
        "    assert call.arguments == {'code': '1_000', 'n': 3}, call\n"
        "    assert 'line 1' in turn.call_error, turn\n"
        "    return 1.0\n"
    )
    good = "<tool_call><function=run><parameter=code>1_000</parameter><parameter=n>3</parameter></function></tool_call>"
    monkeypatch.setattr(FakeEngine, "says", lambda self, request: f"<tool_call>x</tool_call>{good}")
    [sample] = play(file, "typed", count=1, parser="qwen3_coder", row={"tools": json.dumps(TOOLS)}, retries=0)
    assert sample.environment == {"score": 1.0}


def test_the_checks_know_every_parser() -> None:
    assert checked.PARSERS == tuple(PARSERS)
