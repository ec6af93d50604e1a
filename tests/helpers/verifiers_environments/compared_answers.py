"""An environment of the verifiers package whose reward compares the answers of a group."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment() -> vf.Environment:
    def is_longest(completions: Any) -> list[float]:
        lengths = [len(completion[-1]["content"]) for completion in completions]
        return [float(length == max(lengths)) for length in lengths]

    rows = Dataset.from_list([{"question": "talk", "answer": ""}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[is_longest]))
