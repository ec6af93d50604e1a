"""The built-in reward "code": accepted forms of tests, and refused tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.config.schema import DataConfig, RewardConfig
from mrl.reward.assertions import split_tests
from mrl.reward.check import check_hidden, row_check
from mrl.reward.code_tests import read_tests
from mrl.reward.errors import RewardError
from tests.system.reward.test_reward_code import ASSERTIONS


@pytest.mark.parametrize(
    ("answer", "tests"),
    [
        ("assert f(1) == 2", (["assert f(1) == 2"], [])),
        (ASSERTIONS, (ASSERTIONS, [])),
        (json.dumps(ASSERTIONS), (ASSERTIONS, [])),
        ({"inputs": ["1", "2"], "outputs": ["2", "4"]}, ([], [("1", "2"), ("2", "4")])),
        ('{"inputs": ["1"], "outputs": ["2"]}', ([], [("1", "2")])),
        ('[{"input": "1", "output": "2", "testtype": "stdin"}]', ([], [("1", "2")])),
        ("[x] = f()\nassert x", (["[x] = f()\nassert x"], [])),
        pytest.param("[" * 100_000, (["[" * 100_000], []), id="nested deeply"),
    ],
)
def test_the_tests_of_an_answer(answer: object, tests: object) -> None:
    assert read_tests(answer) == tests


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"inputs": ["1"], "outputs": []}, "1 inputs, 0 outputs"),
        ({"inputs": [1], "outputs": ["2"]}, "expected one text input and one text output"),
        (
            {"fn_name": "f", "inputs": [[1]], "outputs": [[2]]},
            r"write calls of a function .*as Python text, such as assert f\(1\) == 2",
        ),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "has no tests"),
        ({"input": "1"}, "has no tests"),
        ([], "has no tests"),
        ("", "has no tests"),
        (7, "'7' has no tests"),
    ],
)
def test_an_answer_without_tests_is_refused(answer: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(answer)


UNSPLIT = {  # a test that a program could pass without solving the problem, and why
    "f(3)": "it has no assertion",
    "assert True": "it has no assertion",
    "assert f(1) == 2 - ": "is not Python",
    "assert f(1) == f(2)": "comes from the program too",
    "assert abs(f(1) - g(1)) < 1": "comes from the program too",
    "from fractions import Fraction\nassert f(1) == Fraction(1, 2)": "comes from the program too",
    "def same(a, b): return a == b\nassert same(f(3), [1])": "inside the sandbox",
    "import numpy as np\nassert np.allclose(f(1), [1])": "inside the sandbox",
    "assert f(1).startswith('a')": "inside the sandbox",
    "assert eval('f(1) == 2')": "inside the sandbox",
    "assert all(a == b for a, b in zip(f(1), [1]))": "inside the sandbox",
    "ok = f(3) == 5\nassert ok": "inside the sandbox",
    "a = b = f(3) == 5\nassert a": "inside the sandbox",
    "ok = f(2) == 3\nassert str(ok) == 'True'": "inside the sandbox",
    "n = 0\nfor i in [1, 2]:\n    n += f(i) == i\nassert n == 2": "inside the sandbox",
    "x = [i for i in range(3) if f(i) == i]\nassert x == [0, 1, 2]": "inside the sandbox",
    "assert [str(i) for i in range(3) if f(i) == i * i] == ['0', '1', '2']": "inside the sandbox",
    "assert '{}'.format(f(2) == 3) == 'True'": "inside the sandbox",
    "def g(x): return 'ok' if x else 'no'\nassert g(3 in f(2)) == 'ok'": "inside the sandbox",
    "def test(a): assert f(a) == 2": "positional arguments of its definition",
    "assert (lambda: f(1) == 3)()": "inside the sandbox",
    "assert isinstance(f(1), Fraction)": "a type that is not plain",
    "assert f'{f(1)}' == '1'": "is a JoinedStr",
    "assert sorted(f(1), key=len) == [1]": "keyword arguments that are not plain",
    "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False": "try statement",
    "with raises(ValueError):\n    f(1)": "with statement",
    "for x in g():\n    assert f(x) == 1": "iterates over something that is not a plain value",
    "def check(f):\n    assert f(1) == 2": "nothing calls it",
    "class Test(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)": "it has no assertion",
    "assert f(1) == 2 and 1 > 2 ** 10 ** 10": "has no plain value: a number of more than 1000000 bits",
    "assert f(1) == [0] * 10 ** 9": "has no plain value: more than 1000000 items",
    "assert f(1) == '%999999999d' % 1": "has no plain value: text formatted to more than 1000",
    "assert f(1) == set(range(2000000))": "has no plain value: more than 1000000 items",
    "assert f(1) @ [1] == [1]": "uses the operator MatMult, which is not evaluated",
    f"assert {'-' * 3000}1 == f(1)": "recursion",
    f"assert f(1) == {'(' * 300}1{')' * 300}": "nested parentheses",
    "for x in range(9999):\n    assert f(x) == x": "more than 2000 statements",
}


@pytest.mark.parametrize("test", UNSPLIT)
def test_what_a_program_could_decide_is_refused(test: str) -> None:
    with pytest.raises(ValueError, match=UNSPLIT[test]):
        split_tests([test])


def test_refused_tests_are_found_before_a_run() -> None:
    data = DataConfig.model_validate({"train": "x.jsonl"})

    def problem(answer: object, **code: str) -> str | None:
        cfg = RewardConfig.model_validate({"function": "code", "code": code})
        return row_check(cfg, data)({"prompt": "x", "answer": answer})

    loop = "while f(1) == 2:\n    break"
    assert problem(ASSERTIONS) is None and problem(loop, unsplit="trust") is None
    assert "test 1: 'while f(1) == 2: break' is a while statement" in (problem(loop) or "")


def test_what_programs_could_read_is_refused(tmp_path: Path) -> None:
    cfg = RewardConfig.model_validate({"function": "code"})
    check_hidden(cfg, {"run.root": str(tmp_path), "data": "/usr/local/src/x", "other data": "/usr/lib/data"})
    with pytest.raises(RewardError, match="^run.root: .* can read all of /(usr/)?bin, and so /usr/bin/runs: move"):
        check_hidden(cfg, {"run.root": "/usr/bin/runs"})
    (tmp_path / "link").symlink_to("/usr/bin")
    with pytest.raises(RewardError, match="^data: "):
        check_hidden(cfg, {"data": str(tmp_path / "link" / "x.jsonl")})
