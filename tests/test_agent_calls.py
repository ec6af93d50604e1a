"""Calls of tools in what a model says, and the programs that it has run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.agents.calls import PARSERS, BadCall, Call, fenced, hermes, load_parser, qwen3_coder
from mrl.config.checks import agent as checked
from mrl.core import Request
from mrl.reward.sandbox import found
from mrl.user_functions import FunctionError
from tests.test_agents import FakeEngine, play


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        (hermes, "2 + 2 is 4", []),
        (hermes, 'a <tool_call>\n{"name": "f", "arguments": {"x": [1]}}\n</tool_call> b', [Call("f", {"x": [1]})]),
        (hermes, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [Call("f", {"x": 1})]),
        (hermes, '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>', [Call("f"), Call("g")]),
        (
            qwen3_coder,
            "<tool_call>\n<function=run>\n<parameter=code>\nprint(1)\nx\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
            "<parameter=deep>\nTrue\n</parameter>\n</function>\n</tool_call>",
            [Call("run", {"code": "print(1)\nx", "n": 3, "deep": True})],
        ),
        (
            qwen3_coder,
            "<tool_call><function=f><parameter=a>{{'x': 1}}</parameter><parameter=b>...</parameter>"
            "<parameter=c>{(1, 2): 3}</parameter></function></tool_call>",
            [Call("f", {"a": "{{'x': 1}}", "b": "...", "c": "{(1, 2): 3}"})],
        ),
        (fenced, "so\n```python\nprint(1)\n```\nand\n```\nls\n```", [
            Call("python", {"code": "print(1)\n"}),
            Call("code", {"code": "ls\n"}),
        ]),
    ],
)  # fmt: skip
def test_calls_are_read(parser: Any, text: str, calls: list[Call]) -> None:
    assert parser(text) == calls


@pytest.mark.parametrize(
    ("parser", "text", "message"),
    [
        (hermes, '<tool_call>{"name": "f"', "not closed"),
        (hermes, '<tool_call>{"name": 3}</tool_call>', "must be JSON"),
        (hermes, "<tool_call>[" * 3000 + "</tool_call>", "must be JSON"),
        (hermes, '<tool_call>["f"]</tool_call>', "must be JSON"),
        (hermes, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be JSON"),
        (qwen3_coder, '<tool_call>{"name": "f"}</tool_call>', "must be <function="),
        (fenced, "```python\nprint(1)", "not closed"),
    ],
)
def test_a_call_that_cannot_be_read_is_told_to_the_model(parser: Any, text: str, message: str) -> None:
    with pytest.raises(BadCall, match=message):
        parser(text)


OWN = """
def braces(text):
    if text.count("{") != text.count("}"):
        raise ValueError("close your braces")
    return [(part.partition("}")[0], {}) for part in text.split("{")[1:]]

def wrong(text):
    return ["f"]
"""


def test_a_parser_may_be_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    parser = load_parser(f"{file}:braces")
    assert parser("{a} and {b}") == [Call("a"), Call("b")]
    with pytest.raises(BadCall, match="close your braces"):
        parser("{a")
    with pytest.raises(TypeError, match="expected .name, arguments by name."):
        load_parser(f"{file}:wrong")("x")
    with pytest.raises(FunctionError, match="agent.parser .*defines no 'brace'"):
        load_parser(f"{file}:brace")


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


@pytest.mark.skipif(found()[1] is not None, reason=f"programs cannot be shut in here: {found()[1]}")
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


def test_the_checks_know_every_parser() -> None:
    assert checked.PARSERS == tuple(PARSERS)
