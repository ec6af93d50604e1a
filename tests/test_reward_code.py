"""Built-in reward "code": what counts as the program, as a test, and as passed."""

from __future__ import annotations

import json

import pytest
from test_reward_pool import sample
from test_reward_sandbox import needs_bubblewrap

from mrl.config.schema import RewardConfig
from mrl.reward import RewardError, RewardManager
from mrl.reward.code_tests import CodeReward, extract_program, read_tests
from mrl.reward.sandbox import Limits, isolate

LIMITS = Limits(wall_s=10.0, memory_mib=256)
UNISOLATED = CodeReward(LIMITS, "none")
DOUBLE = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nThat doubles."
ASSERTIONS = ["assert double(2) == 4", "assert double(3) == 6"]


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("first\n```py\nprint(1)\n```\nthen\n```\nprint(2)\n```\n", "print(2)\n"),
        ("```python\nprint(1)\n```\nprints\n```text\n1\n```", "print(1)\n"),
        ("<think>```</think>\n```python\nprint(1)", "<think>```</think>\n```python\nprint(1)"),
    ],
)
def test_the_program_of_a_response(response: str, program: str) -> None:
    assert extract_program(response) == program


@pytest.mark.parametrize(
    ("answer", "tests"),
    [
        ("assert f(1) == 2", ["assert f(1) == 2"]),
        (ASSERTIONS, ASSERTIONS),
        (json.dumps(ASSERTIONS), ASSERTIONS),
        ({"inputs": ["1", "2"], "outputs": ["2", "4"]}, [("1", "2"), ("2", "4")]),
        ('{"inputs": ["1"], "outputs": ["2"]}', [("1", "2")]),
        ("[x] = f()\nassert x", ["[x] = f()\nassert x"]),
    ],
)
def test_the_tests_of_an_answer(answer: object, tests: object) -> None:
    assert read_tests(answer) == tests


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"inputs": ["1"], "outputs": []}, "1 inputs, 0 outputs"),
        ({"inputs": [1], "outputs": ["2"]}, "expected one text of each"),
        ({"input": "1"}, "holds no tests"),
        ([], "holds no tests"),
        ("", "holds no tests"),
        (7, "'7' holds no tests"),
    ],
)
def test_an_answer_without_tests_is_refused(answer: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(answer)


def test_assertions() -> None:
    assert UNISOLATED(DOUBLE, ASSERTIONS) == {"score": 1, "tests_passed": 1}
    assert UNISOLATED(DOUBLE, [*ASSERTIONS, "assert double(1) == 3"]) == {
        "score": 0,
        "tests_passed": pytest.approx(2 / 3),
    }
    assert UNISOLATED(DOUBLE, "def check(f):\n    assert f(0) == 0\ncheck(double)")["score"] == 1
    partial = CodeReward(LIMITS, "none", partial_credit=True)
    assert partial(DOUBLE, [*ASSERTIONS, "raise SystemExit(0)", "assert False"])["score"] == 0.5


def test_inputs_and_outputs() -> None:
    program = "n = int(input())\nfor i in range(n): print(i, end=' \\n')"
    tests = {"inputs": ["2\n", "0\n"], "outputs": ["0\n1\n\n", ""]}
    assert UNISOLATED(program, tests)["score"] == 1
    assert UNISOLATED(program, {"inputs": ["2", "x"], "outputs": ["0\n1", ""]}) == {"score": 0, "tests_passed": 0.5}
    assert UNISOLATED(program, {"inputs": ["2"], "outputs": ["0 1"]})["score"] == 0


FORGED = {
    "ends early": "import os; os._exit(0)",
    "exits": "import sys; sys.exit(0)",
    "prints": "print('ok\\n' * 100)",
    "prints like the report": "print('\\n'.join(f'{x:032x} {n}' for x in range(9) for n in range(3)))",
    "ends at the end": "import atexit; atexit.register(lambda: print('0'))",
    "breaks print and json": "import builtins, json; builtins.print = json.load = lambda *a, **k: None",
    "defines assert away": "AssertionError = Exception\ndef double(x): return None",
    "writes to every file": "import os\nfor n in range(64):\n    try: os.write(n, b'x 0')\n    except OSError: pass",
    "no Python": "def double(x) return",
    "nothing": "",
}


@pytest.mark.parametrize("way", FORGED)
def test_a_program_that_does_not_solve_it_does_not_pass(way: str) -> None:
    assert UNISOLATED(FORGED[way], ASSERTIONS) == {"score": 0, "tests_passed": 0}


def test_all_tests_share_the_time() -> None:
    slow = CodeReward(Limits(wall_s=4.0, memory_mib=256), "none", partial_credit=True)
    program = "import time\nif input() == 'slow': time.sleep(100)\nprint('done')"
    tests = {"inputs": ["\n", "slow", "\n", "\n"], "outputs": ["done"] * 4}
    assert slow(program, tests)["score"] == 0.25


@needs_bubblewrap
def test_code_through_the_manager() -> None:
    samples = [
        sample(0, DOUBLE, {"answer": ASSERTIONS}),
        sample(1, "print(open('/etc/passwd').read())", {"answer": {"inputs": [""], "outputs": ["x"]}}),
        sample(2, "while True: pass", {"answer": ASSERTIONS}),
    ]
    cfg = RewardConfig.model_validate({"function": "code", "code": {"wall_s": 2.0}})
    with RewardManager(cfg) as manager:
        manager.collect(samples)
        with pytest.raises(RewardError, match="(?s)reward function 'code' on sample 3 .*holds no tests"):
            manager.collect([sample(3, DOUBLE, {"answer": 7})])
    assert [s.score for s in samples] == [1, 0, 0]


def test_a_run_does_not_start_where_programs_cannot_be_shut_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "find_bwrap", lambda: None)
    with pytest.raises(RewardError, match="built-in reward 'code': cannot shut in untrusted programs"):
        CodeReward(LIMITS)
