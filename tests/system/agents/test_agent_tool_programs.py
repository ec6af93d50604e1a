"""Tool calls: comparison with SGLang's parsers, and user programs that receive them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.agents.tool_call_parsers import ToolCall
from mrl.core import Request
from mrl.inference.sglang.command import SHIM
from mrl.reward.sandbox import find_sandbox
from tests.helpers.tool_calls import TEXTS, TOOLS
from tests.system.agents.test_agents import FakeEngine, play

ROOT = Path(__file__).parents[3]

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


@pytest.mark.slow
def test_where_sglang_reads_the_same_calls() -> None:
    """mrl's parsers agree with SGLang's on the texts marked as the same. docs/agents.md lists the differences."""
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
    """The program receives arguments typed by the row's tools, and a valid call beside an invalid one's error."""
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
