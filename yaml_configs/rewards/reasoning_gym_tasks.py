"""Rewards by the verdicts of reasoning-gym (extra `tasks`). A row's `data_source` names its task."""

from __future__ import annotations

import re

import reasoning_gym

LAST = re.compile(r"(-?\d+(?:\.\d+)?)[.!]?\s*$")


def final_number(prompt: str, response: str, row: dict) -> float:
    """1.0 if the response ends with the right number. A response that goes on behind its answer, or that the token
    limit cuts, scores 0, so the model also learns to stop."""
    found = LAST.search(response)
    entry = {"question": row["prompt"], "answer": row["answer"], "metadata": {"source_dataset": row["data_source"]}}
    scorer = reasoning_gym.get_score_answer_fn(row["data_source"])
    return float(scorer(found[1] if found else None, entry) == 1.0)
