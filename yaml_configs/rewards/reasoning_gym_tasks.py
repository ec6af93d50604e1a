"""Rewards by the verdicts of reasoning-gym (extra `tasks`). A row's `data_source` names its task."""

from __future__ import annotations

import re

import reasoning_gym

LAST = re.compile(r"(-?\d+(?:\.\d+)?)[.!]?\s*$")
NEAR_CREDIT = 0.4  # limit of the score of a wrong number


def final_number(prompt: str, response: str, row: dict) -> float:
    """Returns 1.0 if the response ends with the right number, else 0.0."""
    found = LAST.search(response)
    entry = {"question": row["prompt"], "answer": row["answer"], "metadata": {"source_dataset": row["data_source"]}}
    scorer = reasoning_gym.get_score_answer_fn(row["data_source"])
    return float(scorer(found[1] if found else None, entry) == 1.0)


def number_or_near(prompt: str, response: str, row: dict) -> dict[str, float]:
    """Returns 1.0 for the right number at the end; for a wrong number with the right sign 0.4, less 0.04 for each unit
    that it is off.

    The model answers almost every problem with a positive number at first. Without the credit for the sign, all
    responses to a problem with a negative result score 0, and GRPO learns nothing from a group of equal scores.
    """
    right = final_number(prompt, response, row)
    found = LAST.search(response)
    if right or found is None or found[1].startswith("-") != row["answer"].startswith("-"):
        return {"score": right, "right": right}
    off = abs(float(found[1]) - float(row["answer"]))
    return {"score": NEAR_CREDIT * max(0.0, 1 - off / 10), "right": right}
