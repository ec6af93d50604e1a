"""Extraction of final answers and programs from the forms that models write."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from mrl.config.schema import DataConfig, RewardConfig
from mrl.reward import extract
from mrl.reward.check import row_check
from mrl.reward.functions import arithmetic, multiple_choice
from mrl.reward.math_answer import math, read_answer
from mrl.reward.python_text import asked_names
from tests.helpers.reward_responses import ARITHMETIC, CHOICE, CODE, MATH


def test_there_are_many_forms() -> None:
    assert sum(map(len, MATH.values())) >= 100
    assert sum(map(len, MATH.values())) + len(ARITHMETIC) + len(CHOICE) + len(CODE) >= 200


@pytest.mark.parametrize("form", MATH)
def test_math(form: str) -> None:
    wrong = [(response, answer, score) for response, answer, score in MATH[form] if math(response, answer) != score]
    assert not wrong


@pytest.mark.parametrize(("response", "answer", "score"), ARITHMETIC)
def test_arithmetic(response: str, answer: str, score: int) -> None:
    assert arithmetic(response, answer) == score


@pytest.mark.parametrize(("response", "answer", "score"), CHOICE)
def test_multiple_choice(response: str, answer: str, score: int) -> None:
    assert multiple_choice(response, answer) == score


@pytest.mark.parametrize("form", CODE)
def test_programs(form: str) -> None:
    response, program = CODE[form]
    assert extract.program(response, {"double"}).strip() == program


def test_a_program_that_only_prints_is_preferred_to_its_output() -> None:
    program = "n = int(input())\nprint(2 * n)"
    assert extract.program(f"```\n{program}\n```\nFor 2:\n```\n4\n```") == program
    assert extract.program(f"```python\n{program}\n```\nFor 2:\n```\n4\n```") == program


def test_a_string_that_is_never_closed_does_not_swallow_what_follows() -> None:
    broken = 'def double(x):\n    """Doubles.\n    return 2 * x'
    right = "def double(x):\n    return 2 * x"
    assert extract.program(f"```python\n{broken}\n```\nBetter:\n```python\n{right}\n```", {"double"}) == right


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["assert f(1) == sum([1])"], {"f"}),
        (["from solution import f, g", "def test_x():\n    y = f(1)\n    assert y == g(2)"], {"f", "g"}),
        (["def check(candidate):\n    assert candidate(1) == 2\n", "check(h)"], {"h"}),
        (["import math\nassert math.isclose(Circle(1).area(), math.pi)"], {"Circle"}),
        (["assert ("], set()),
    ],
)
def test_names_that_tests_ask_for(texts: list[str], names: set[str]) -> None:
    assert asked_names(texts) == names


LONG = ("\\boxed{", "```\n", '"""\n```\n', "<think>", "the answer is ", "\\boxed x ", "#### ", "$5 ")


@pytest.mark.parametrize("text", LONG)
def test_extraction_is_bounded(text: str) -> None:
    text, before = text * 10_000, time.monotonic()
    list(extract.final_answers(text))
    extract.program(text, {"f"})
    arithmetic(text, "7")
    assert time.monotonic() - before < 3


@pytest.mark.parametrize(
    "answer", [r"\$36", r"\$18.90", "$5", "5$", "$1,000", "€5", "50%", "$x=2$ or $x=3$", "Tuesday"]
)
def test_answers_that_math_reads(answer: str) -> None:
    read_answer(answer)
    assert math(f"\\boxed{{{answer}}}", answer) == 1


@pytest.mark.parametrize("answer", ["", " ", "$", "$$", "?", r"\frac{1}{", r"\boxed{}"])
def test_an_answer_that_math_cannot_read_is_found_before_the_run(answer: str) -> None:
    check = row_check(RewardConfig(function="math"), DataConfig.model_validate({"train": "x.jsonl"}))
    assert "math-verify cannot parse the answer" in (check({"prompt": "x", "answer": answer}) or "")
    assert check({"prompt": "x", "answer": r"\$36"}) is None


def test_math_reads_answers_of_a_real_model() -> None:
    """Reads the answers of a real model: 50 responses of SmolLM2-135M-Instruct to gsm_symbolic problems of
    reasoning-gym (seed 7, difficulty 1), 25 greedy and 25 at temperature 0.7, at most 160 tokens. `said` is the number
    that a response states as its answer, read by eye; null if it states none. All are wrong."""
    lines = (Path(__file__).parent / "real_answers" / "smollm2_gsm.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 50 and not any(math(row["response"], row["answer"]) for row in rows)
    missed = [row["response"] for row in rows if row["said"] is not None and not math(row["response"], row["said"])]
    assert missed == ["The sisters need to collect 4 signatures to reach the goal of reaching 120."], (
        "the last number is read"
    )


def test_no_verdict_is_an_error_and_not_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.reward.math_answer.LIMIT_S", 1)
    with pytest.raises(ValueError, match=r"took more than 1 s to compare '9\^\{9\^\{9\^9\}\}' with '42'"):
        math(r"\boxed{9^{9^{9^9}}}", "42")
