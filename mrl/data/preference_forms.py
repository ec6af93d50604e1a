"""Contents of a preference row: its prompt, its responses, and the comparisons between them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from mrl.config.schema import Form, PreferenceDataConfig
from mrl.data.columns import without_nulls
from mrl.data.rows import Row, content_problem, missing_key_problem

Comparison = tuple[tuple[int, float], ...]  # places among a row's responses, and their scores


@dataclass(frozen=True)
class ScoredResponses:
    """Responses of a row, text or messages, by name and in the row's order; scores: higher is better; a label is 1 or
    0.
    """

    responses: dict[str, Any]
    scores: tuple[float, ...]


def read_responses(row: Row, cfg: PreferenceDataConfig, form: Form) -> ScoredResponses:
    """Returns the responses of a row that has the required keys. Raises ValueError, which says why they are
    unusable.
    """
    needed = cfg.needed(form, present_keys(row), margins=False)
    if "score_key" in needed:
        score = row[needed["score_key"]]
        if not is_number(score):
            raise ValueError(f"{needed['score_key']!r} must be a finite number, not {score!r}")
        found = ScoredResponses({cfg.completion_key: row[cfg.completion_key]}, (float(score),))
    elif "labels_key" in needed:
        return _of_steps(row[cfg.completions_key], row[needed["labels_key"]], cfg.completions_key, needed["labels_key"])
    elif "completions_key" in needed:
        found = _of_list(row[cfg.completions_key], cfg.completions_key)
    elif "label_key" in needed:
        label = row[cfg.label_key]
        if not isinstance(label, bool | int | float) or label not in (0, 1):
            raise ValueError(f"{cfg.label_key!r} must be true or false, not {label!r}")
        found = ScoredResponses({cfg.completion_key: row[cfg.completion_key]}, (float(label),))
    else:
        found = _of_halves(row[cfg.chosen_key], row[cfg.rejected_key], cfg, form)
    for name, response in found.responses.items():
        if problem := content_problem(response, name, cfg.chat_template):
            raise ValueError(problem)
    return found


def _of_steps(steps: Any, labels: Any, key: str, labels_key: str) -> ScoredResponses:
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step for step in steps):
        raise ValueError(f"{key!r} must be a list of steps, each a string")
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise ValueError(f"{labels_key!r} must be a list with a label for each of the {len(steps)} steps")
    for label in labels:
        if not isinstance(label, bool | int) or label not in (0, 1):
            raise ValueError(f"{labels_key!r} must be true or false, not {label!r}")
    return ScoredResponses({f"{key}[{i}]": step for i, step in enumerate(steps)}, tuple(map(float, labels)))


def _of_halves(chosen: Any, rejected: Any, cfg: PreferenceDataConfig, form: Form) -> ScoredResponses:
    """Returns a chosen and a rejected response; for lists, several texts may be rejected, as in RewardBench 2."""
    texts = isinstance(rejected, list) and bool(rejected) and all(isinstance(text, str) for text in rejected)
    if form != "lists" or not texts:
        return ScoredResponses({cfg.chosen_key: chosen, cfg.rejected_key: rejected}, (1.0, 0.0))
    if isinstance(chosen, list) and len(chosen) == 1:
        chosen = chosen[0]
    worse = {f"{cfg.rejected_key}[{i}]": text for i, text in enumerate(rejected)}
    return ScoredResponses({cfg.chosen_key: chosen, **worse}, (float(len(rejected)), *len(rejected) * (0.0,)))


def _of_list(items: Any, key: str) -> ScoredResponses:
    """Returns ranked responses. A response's score is the number of worse ones: the lowest rank is the best."""
    if not isinstance(items, list) or len(items) < 2:
        raise ValueError(f"{key!r} must be a list of two or more completions with their ranks")
    for i, item in enumerate(items):
        if not isinstance(item, dict) or not {"rank", "completion"} <= present_keys(item):
            raise ValueError(f"{key}[{i}] must have 'rank' and 'completion'")
        if not is_number(item["rank"]):
            raise ValueError(f"{key}[{i}].rank must be a number, not {item['rank']!r}")
    ranks = [item["rank"] for item in items]
    scores = tuple(float(sum(rank < other for other in ranks)) for rank in ranks)
    return ScoredResponses({f"{key}[{i}].completion": item["completion"] for i, item in enumerate(items)}, scores)


def comparisons_of(scores: tuple[float, ...], form: Form, all_pairs: bool) -> tuple[list[Comparison], int]:
    """Returns (comparisons, best response first; number of comparisons dropped because their responses have equal
    rank).
    """
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    best, worst = order[0], order[-1]
    if form in ("labels", "scores"):
        return [((i, scores[i]),) for i in range(len(scores))], 0
    if form == "steps":
        return [tuple(enumerate(scores))], 0
    if form == "lists":
        is_tied = scores[best] == scores[worst]
        return ([], 1) if is_tied else ([tuple((i, scores[i]) for i in order)], 0)
    pairs = list(itertools.combinations(order, 2)) if all_pairs else [(best, worst)]
    apart = [pair for pair in pairs if scores[pair[0]] > scores[pair[1]]]
    return [((a, 1.0), (b, 0.0)) for a, b in apart], len(pairs) - len(apart)


def split_responses(prompt: Any, responses: dict[str, Any]) -> tuple[list[Row], list[list[Row]]]:
    """Splits a conversation into (messages of the prompt, messages of each response). prompt: None if the responses
    begin with it; responses may also repeat a given prompt. Raises ValueError for responses that do not continue a
    prompt.
    """
    wholes = [as_messages(response, "assistant") for response in responses.values()]
    before = [] if prompt is None else as_messages(prompt, "user")
    shared = len(before)
    if prompt is None:
        shared = min(_common_messages(wholes), *(len(messages) - 1 for messages in wholes))
        if shared < 1:
            raise ValueError("without a prompt, all conversations must begin with the same messages")
        before = wholes[0][:shared]
    elif not all(len(messages) > shared and _common_messages([before, messages]) == shared for messages in wholes):
        shared = 0
    answers = [messages[shared:] for messages in wholes]
    for name, messages in zip(responses, answers, strict=True):
        first, last = messages[0].get("role"), messages[-1].get("role")
        if first in ("user", "system") and prompt is not None:
            raise ValueError(f"{name!r} begins with a {first} message instead of the prompt")
        if last in ("user", "system"):
            raise ValueError(f"{name!r} ends with a {last} message: it has no response to train on")
    return before, answers


def as_messages(value: Any, role: str) -> list[Row]:
    """Returns text as a message of that role; messages as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def margin(row: Row, key: str) -> float:
    """Returns the row's margin. Raises ValueError if it is missing or not a finite number."""
    if row.get(key) is None:
        raise ValueError(missing_key_problem(row, key, "data.margin_key"))
    if not is_number(row[key]):
        raise ValueError(f"{key!r} must be a finite number, not {row[key]!r}")
    return float(row[key])


def is_number(value: Any) -> bool:
    """Returns True for a finite number that is not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def present_keys(row: Row) -> set[str]:
    """Returns the keys with a value: tables have all keys in every row."""
    return {key for key, value in row.items() if value is not None}


def _common_messages(conversations: list[list[Row]]) -> int:
    """Returns the number of leading messages that all share; nulls are keys that a table has added."""
    first, *others = conversations
    same = [all(without_nulls(a) == without_nulls(b) for b in rest) for a, *rest in zip(first, *others, strict=False)]
    return same.index(False) if False in same else len(same)
