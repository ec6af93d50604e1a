"""Rewards by the verdicts of reasoning-gym (extra `tasks`). A row's `data_source` names its task."""

from __future__ import annotations

import re

import reasoning_gym

LAST = re.compile(r"(-?\d+(?:\.\d+)?)[.!]?\s*$")
NEAR_MISS = 0.1  # highest score of a wrong number


def final_number(prompt: str, response: str, row: dict) -> float:
    """Returns 1.0 if the response ends with the right number, else 0.0."""
    found = LAST.search(response)
    entry = {"question": row["prompt"], "answer": row["answer"], "metadata": {"source_dataset": row["data_source"]}}
    scorer = reasoning_gym.get_score_answer_fn(row["data_source"])
    return float(scorer(found[1] if found else None, entry) == 1.0)


def near_number(prompt: str, response: str, row: dict) -> dict[str, float]:
    """Returns 1.0 for the right number at the end, and at most 0.1 for a wrong one, more if it is nearer.

    GRPO learns nothing from a group whose responses all score 0.
    """
    right = final_number(prompt, response, row)
    found = LAST.search(response)
    near = NEAR_MISS / (1 + abs(float(found[1]) - float(row["answer"]))) if found else 0.0
    return {"score": right or near, "right": right}
