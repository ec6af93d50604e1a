"""A single-turn environment of the verifiers package: answer with the last digit of a number."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(size: int = 6, first: int = 10, with_eval: bool = True) -> vf.Environment:
    def rows(start: int) -> Dataset:
        numbers = range(start, start + size)
        return Dataset.from_list(
            [{"question": f"last digit of {n}?", "answer": str(n % 10), "info": {"number": n}} for n in numbers]
        )

    def is_right(completion: Any, answer: str) -> float:
        return float(completion[-1]["content"].strip().startswith(answer))

    async def length(completion: Any, info: dict[str, Any]) -> float:
        return len(completion[-1]["content"]) / info["number"]

    rubric = vf.Rubric(funcs=[is_right, length], weights=[1.0, 0.25])
    return vf.SingleTurnEnv(
        dataset=rows(first),
        eval_dataset=rows(first + size) if with_eval else None,
        system_prompt="Answer with one digit.",
        rubric=rubric,
    )
