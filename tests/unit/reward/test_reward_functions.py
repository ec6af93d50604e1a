"""Built-in rewards, and error messages for a wrong reward.function."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mrl.config.builtin_rewards import PARTS
from mrl.config.schema import FormatConfig
from mrl.reward import functions
from mrl.reward.errors import RewardError
from mrl.reward.functions import arithmetic, exact_match, multiple_choice, sorted_digits
from mrl.reward.loading import check_result, load
from mrl.reward.math_answer import math
from mrl.reward.score_requests import Outcome, ScoreRequest


def test_exact_match() -> None:
    assert exact_match(" 42\n", "42") == 1.0
    assert exact_match("42.", "42") == 0.0


def test_what_built_ins_give_beside_a_score_is_known_by_name() -> None:
    """Built-in rewards return the declared parts, against whose names configurations are checked."""
    assert sorted_digits("1", "1").keys() == {"score", *PARTS["sorted_digits"]}
    assert all(isinstance(function("1", "1"), float) for function in (arithmetic, exact_match))
    assert isinstance(multiple_choice("A", "A"), float)


@pytest.mark.parametrize(
    ("response", "exact", "right"),
    [
        ("12345.", 1, 1),
        ("12345", 1, 1),
        ("12354.", 0, 0.6),
        ("123456.", 0, 1),
        ("12345..", 0, 1),
        ("1.", 0, 0.2),
        (".", 0, 0),
        ("", 0, 0),
    ],
)
def test_sorted_digits(response: str, exact: float, right: float) -> None:
    want = {"score": (exact + right) / 2, "exact_match": exact, "right_positions": right}
    assert sorted_digits(response, "12345.") == pytest.approx(want)


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("12 + 30 = 42", "42", 1),
        ("The answer is 42.", "42", 1),
        ("42, because 6 * 7", "42", 0),
        ("so $1,234.50 in total", "1234.5", 1),
        ("x = -3", "-3", 1),
        ("5-3", "3", 1),
        ("x = \N{MINUS SIGN}3", "3", 0),
        ("x = \N{MINUS SIGN}3", "-3", 1),
        ("5\N{MINUS SIGN}3", "3", 1),
        ("it is 1e3", "1000", 1),
        ("0.30000000000000004", "0.3", 0),
        (".5", "0.50", 1),
        ("72", "48 / 2 = 24, 48 + 24 = 72\n#### 72", 1),
        ("none", "7", 0),
        ("9" * 100_000, "7", 0),
        ("1e99999999999", "7", 0),
    ],
)
def test_arithmetic(response: str, answer: str, score: float) -> None:
    assert arithmetic(response, answer) == score


def test_arithmetic_refuses_an_answer_without_a_number() -> None:
    with pytest.raises(ValueError, match="'seven' contains no number"):
        arithmetic("7", "seven")


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("B", "B", 1),
        ("(b).", "B", 1),
        ("**B**", "(B) Paris", 1),
        ("A, B and C are wrong. The answer is D.", "D", 1),
        ("The answer is A. No, the answer is: (C)", "C", 1),
        ("Answer: $B$", "b", 1),
        ("<answer>B</answer>", "B", 1),
        ("the answer is A, that is \\boxed{C}", "C", 1),
        ("\\boxed{\\text{B}}", "B", 1),
        ("the answer is A", "B", 0),
        ("The answer is Berlin", "B", 0),
        ("The answer is a city", "A", 0),
        ("A good question, to which I have none", "A", 0),
        ("", "A", 0),
    ],
)
def test_multiple_choice(response: str, answer: str, score: float) -> None:
    assert multiple_choice(response, answer) == score


def test_multiple_choice_refuses_an_answer_without_a_letter() -> None:
    with pytest.raises(ValueError, match="'Paris' does not begin with a letter"):
        multiple_choice("B", "Paris")


THINK = FormatConfig().pattern


@pytest.mark.parametrize(
    ("response", "pattern", "score"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>\n", THINK, 1),
        ("<think></think><answer></answer>", THINK, 1),
        ("Well, <think>a</think><answer>b</answer>", THINK, 0),
        ("<think>a</think><answer>b</answer> and more", THINK, 0),
        ("<think>a<think>b</think><answer>c</answer>", THINK, 0),
        ("<think>a</think><answer>b", THINK, 0),
        ("12", r"\d+", 1),
        ("12 x", r"\d+", 0),
    ],
)
def test_format(response: str, pattern: str, score: float) -> None:
    assert functions.format(response, 0, pattern=pattern) == score


@pytest.mark.parametrize(("tokens", "short", "long"), [(0, 1, 0), (10, 1, 0), (15, 0.75, 0.25), (30, 0, 1), (99, 0, 1)])
def test_length(tokens: int, short: float, long: float) -> None:
    assert functions.length("", tokens, full_tokens=10, zero_tokens=30) == short
    assert functions.length("", tokens, full_tokens=30, zero_tokens=10) == long


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("We get \\boxed{\\frac{2}{4}}.", "1/2", 1),
        ("We get \\boxed{\\frac{2}{4}}.", "$\\frac{1}{2}$", 1),
        ("First 3, then 4, so it is 0.5", "\\boxed{\\frac12}", 1),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", 1),
        ("\\boxed{3}", "4", 0),
        ("\\boxed{x = 4}", "4", 1),
        ("\\boxed{1 + 3 = 4}", "4", 1),
        ("\\boxed{1 = 4}", "4", 0),
        ("\\boxed{x = 3 = 4}", "4", 0),
        ("", "4", 0),
        ("no idea", "4", 0),
    ],
)
def test_math(response: str, answer: str, score: float) -> None:
    assert math(response, answer) == score


def test_math_refuses_an_answer_that_it_cannot_parse() -> None:
    with pytest.raises(ValueError, match="cannot parse the answer ''"):
        math("\\boxed{1}", "")


def test_builtins_compare_with_the_configured_key_of_the_row() -> None:
    assert load("exact_match", "target")(ScoreRequest("p", "7", {"target": 7})) == 1.0
    with pytest.raises(KeyError, match="no 'answer' .*did you mean 'answers'"):
        load("exact_match")(ScoreRequest("p", "7", {"answers": "7"}))


@pytest.fixture
def module(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "my_reward.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


def test_load_a_users_function_and_its_neighbours(module: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "my_reward_neighbour.py").write_text("BONUS = 5\n")
    path = module("""
        from my_reward_neighbour import BONUS
        def score(prompt, response, row):
            return len(prompt) + len(response) + row["x"] + BONUS
        """)
    assert load(f"{path}:score")(ScoreRequest("ab", "c", {"x": 10})) == 18


def test_files_of_one_name_in_two_folders_are_two_files(tmp_path: Path) -> None:
    for name, worth in (("one", 1), ("two", 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "worth_of.py").write_text(f"WORTH = {worth}\n")
        text = "import sys\nfrom worth_of import WORTH\n\n\ndef score(prompt, response, row):\n"
        text += "    return {'score': WORTH, 'is_own': sys.modules[__name__].__file__ == __file__}\n"
        (folder / "same_stem.py").write_text(text)
    specs = [f"{tmp_path / name / 'same_stem.py'}:score" for name in ("one", "two")]
    first, second = (load(spec) for spec in specs)
    call = ScoreRequest("", "", {})
    assert [f(call) for f in (first, second)] == [{"score": 1, "is_own": True}, {"score": 2, "is_own": True}]
    assert load(specs[0])(call)["score"] == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "exact_mach",
            "is not a built-in; did you mean 'exact_match'.*known: arithmetic, code, environment, exact_match",
        ),
        ("{dir}/my_rewards.py:score", "file not found: .*my_rewards.py; did you mean 'my_reward.py'"),
        ("{dir}/nowhere/x.py:score", "file not found: .*nowhere/x.py"),
        ("{dir}/my_reward.py:scor", "defines no 'scor'; did you mean 'score'"),
        ("{dir}/my_reward.py:zzz", "defines no 'zzz'; .*'later', 'score', 'two'"),
        ("{dir}/my_reward.py:TABLE", "is a dict, not a function"),
        ("{dir}/my_reward.py:two", r"must take \(prompt, response, row\): too many positional"),
        ("{dir}/my_reward.py:later", "is an async function"),
    ],
)
def test_what_is_wrong_with_a_function_is_said(
    module: Callable[[str], Path], tmp_path: Path, spec: str, message: str
) -> None:
    module("""
        TABLE = {}
        def score(prompt, response, row): return 0.0
        def two(prompt, response): return 0.0
        async def later(prompt, response, row): return 0.0
        def _private(prompt, response, row): return 0.0
        """)
    with pytest.raises(RewardError, match=message):
        load(spec.format(dir=tmp_path))


def test_a_file_that_fails_to_import_shows_its_line(module: Callable[[str], Path]) -> None:
    path = module("import json\nimport no_such_module_anywhere\n")
    where = r"importing .*my_reward.py failed: .*no_such_module_anywhere' \(line 2\): install it in"
    with pytest.raises(RewardError, match=where):
        load(f"{path}:score")


@pytest.mark.parametrize("value", [1, 1.0, True, np.True_, np.float32(1), np.int64(1)])
def test_numbers_are_scores(value: object) -> None:
    assert check_result(value) == Outcome(1.0)


def test_a_dict_is_a_score_and_its_parts() -> None:
    assert check_result({"score": 1, "length": 0.5}) == Outcome(1.0, {"length": 0.5})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "the score must be a float, got NoneType"),
        ("1.0", "the score must be a float, got str '1.0'"),
        (float("nan"), "the score must be finite, got nan"),
        (np.float32("inf"), "the score must be finite, got inf"),
        (1e39, "the score must fit into float32, got 1e.39"),
        ([1.0], "the score must be a float, got list"),
        ({"reward": 1.0}, r"dict without 'score', only \['reward'\]"),
        ({"score": 1.0, "part": float("-inf")}, "'part' must be finite, got -inf"),
        ({"score": 1.0, "part": "a"}, "'part' must be a float, got str"),
        ({"score": 1.0, "mean": 1.0}, "a part named 'mean' would hide the metric"),
    ],
)
def test_other_results_are_refused(value: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        check_result(value)
