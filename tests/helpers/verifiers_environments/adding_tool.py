"""An environment of the verifiers package with a tool: the model computes a sum with the tool."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


async def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def load_environment() -> vf.Environment:
    def asked(completion: Any) -> float:
        return float(sum(len(message.get("tool_calls") or ()) for message in completion))

    def tool_said(completion: Any, answer: str) -> float:
        return float(any(m["role"] == "tool" and m["content"] == answer for m in completion))

    rows = Dataset.from_list([{"question": "1 + 2?", "answer": "3"}, {"question": "2 + 2?", "answer": "4"}])
    rubric = vf.Rubric(funcs=[tool_said, asked], weights=[1.0, 0.1])
    return vf.ToolEnv(dataset=rows, tools=[add], rubric=rubric, max_turns=2)
