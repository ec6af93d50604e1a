"""The built-in reward "code": how it finds the program and the tests, and what passes."""

from __future__ import annotations

import textwrap

import pytest

from mrl.config.builtin_rewards import PARTS
from mrl.config.schema import RewardConfig
from mrl.reward.code_tests import CodeReward
from mrl.reward.errors import RewardError
from mrl.reward.manager import RewardManager
from mrl.reward.sandbox import Limits, isolate
from tests.system.reward.test_reward_pool import sample
from tests.system.reward.test_reward_sandbox import needs_bubblewrap

LIMITS = Limits(wall_s=10.0, memory_mib=256)
UNISOLATED = CodeReward(LIMITS, "none")
DOUBLE = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nThat doubles."
ASSERTIONS = ["assert double(2) == 4", "assert double(3) == 6"]


def test_assertions() -> None:
    assert UNISOLATED(DOUBLE, ASSERTIONS) == {"score": 1, **dict.fromkeys(PARTS["code"], 1)}
    assert UNISOLATED(DOUBLE, [*ASSERTIONS, "assert double(1) == 3"]) == {
        "score": 0,
        "tests_passed": pytest.approx(2 / 3),
    }
    partial = CodeReward(LIMITS, "none", partial_credit=True)
    assert partial(DOUBLE, [*ASSERTIONS, "assert double('a') == 1 / 1", "assert no_such() == 1"])["score"] == 0.5
    assert partial("import sys\ndef double(x): sys.exit(0) if x == 2 else None\n    ", ASSERTIONS)["score"] == 0


SOLVED = {  # a program, and tests that it passes
    "plain values": (
        "def f(x): return x",
        """
        assert f(3) == 3 and f(-1) == -1 and f(2.5) == 2.5 and f(2**100) == 2**100 and f(1j) == 1j
        assert f("é\\ud800") == "é\\ud800" and f(b"x") == b"x" and f(None) is None and f(True) is True
        assert f([1, (2, {3: {4}})]) == [1, (2, {3: {4}})] and f(frozenset([1])) == {1}
        assert f(float("inf")) == float("inf")
        assert not f(0) and f([]) != [0] and 1 <= f(2) < 3 and f(1) in (1, 2) and 3 not in f([1])
        """,
    ),
    "wrappers": (
        "def f(x): yield from x",
        """
        import math
        assert sorted(f([2, 1]), reverse=True) == [2, 1] and len(list(f("ab"))) == 2 and set(f([1, 1])) == set([1])
        assert abs(sum(f([0.1, 0.2])) - 0.3) < 1e-9 and math.isclose(sum(f([1.0])), 1.0, rel_tol=1e-3)
        assert all(f([1, 1])) and isinstance(list(f([])), list) and tuple(f([1]))[0] == 1 and max(f([1, 3])) == 3
        """,
    ),
    "HumanEval": (
        DOUBLE,
        """
        METADATA = {"author": "x"}
        def check(candidate):
            assert candidate(1) == 2, "one"
            assert True, "this prints if this assertion fails"
            for x, y in [(1, 2), (3, 6)]:
                assert candidate(x) == y
            for x, y in zip([0], [0]):
                assert candidate(x) == y
        check(double)
        """,
    ),
    "changed in place": (
        "def f(x): x.sort()",
        """
        x = [2, 1]
        f(x)
        assert x == [1, 2]
        for given, wanted in [([3, 1], [1, 3]), ([2], [2])]:
            f(given)
            assert given == wanted
        """,
    ),
    "an object": (
        "class Stack(list):\n    def push(self, x): self.append(x)\n    def empty(self): return not self",
        """
        stack = Stack()
        stack.push([1])
        assert stack.pop() == [1]
        assert stack.empty()
        assert Stack().empty() is True
        """,
    ),
    "a helper": (
        "from collections import Counter\ndef f(x, key): return {tuple(sorted(x, key=key)): Counter(x)}",
        """
        def last(x): return -x
        wanted = {(2, 1): {1: 1, 2: 1}}
        def keys(x): return list(x)
        assert f([1, 2], last) == wanted
        assert f([1, 2], lambda x: -x) == wanted
        assert keys(f([1, 2], last)) == [(2, 1)]
        assert [f([x], abs) for x in range(2)] == [{(0,): {0: 1}}, {(1,): {1: 1}}]
        """,
    ),
    "the name of a built-in": ("def sum(a, b): return 6", "assert sum(10, 15) == 6"),
    "filter of its own": ("def f(g): return [i for i in range(4) if g(i)]", "assert f(lambda i: i > 1) == [2, 3]"),
    "filtered by the test": ("def f(x): return -x", "k = 1\nassert [f(i) for i in range(3) if i != k] == [0, -2]"),
    "pytest": (
        "def f(x): return x > 0",
        "from solution import f\ndef test_one():\n    assert f(1) == True\ndef test_two():\n    assert f(-1) is False",
    ),
    "operators": (
        "def f(x): return x",
        "assert f(1) << 3 == 8\nassert f(8) >> 2 == 2\nassert f(7) % 4 == 3\nassert 1 << f(2) == 4\n"
        "assert '%s of %05.1f' % ('a', 2) == f('a of 002.0')\nassert '%d items' % f(3) == '3 items'",
    ),
    "Decimal and Fraction": (
        "from decimal import Decimal\nfrom fractions import Fraction\n"
        "def f(x): return Decimal(x) / 4\ndef g(x): return [Fraction(x, 4)]",
        "assert f(2) == 0.5\nassert f(4) == 1\nassert g(2) == [0.5]\nassert abs(g(1)[0] - 0.25) < 1e-9\n"
        "assert f(3) > 0.7 and int(f(8)) == 2",
    ),
    "ranges and views": (
        "def f(n): return range(n)\ndef g(n): return {i: -i for i in range(n)}",
        "assert f(3) == range(3)\nassert list(f(3)) == [0, 1, 2]\nassert g(2).keys() == {0, 1}\n"
        "assert sorted(g(2).items()) == [(0, 0), (1, -1)]\nassert len(f(3)) == 3",
    ),
    "large values": (
        "def f(n): return list(range(n))\ndef g(n): return [i / 7 for i in range(n)]\n"
        "def h(n): return {str(i) for i in range(n)}",
        "assert f(300000) == list(range(300000))\nassert set(f(12000)) == set(range(12000))\n"
        "assert len(g(300000)) == 300000\nassert len(h(50000)) == 50000\nassert g(300000)[1:3] == [1 / 7, 2 / 7]",
    ),
    "zip with its keyword": ("def f(x): return x", "assert list(zip(f([1]), [2], strict=True)) == [(1, 2)]"),
    "joined text": ("def f(x): return x.split()", "assert ' '.join(f('a b')) == 'a b' and f('a b')[0].upper() == 'A'"),
}


@pytest.mark.parametrize("case", SOLVED)
def test_what_is_solved_passes(case: str) -> None:
    program, tests = SOLVED[case]
    tests = textwrap.dedent(tests)
    assert UNISOLATED(program, tests) == {"score": 1, "tests_passed": 1}
    assert UNISOLATED("", tests) == {"score": 0, "tests_passed": 0}


def test_the_refused_test_is_named() -> None:
    with pytest.raises(ValueError, match="^test 2: 'f\\(1\\)' is combined with another value"):
        UNISOLATED(DOUBLE, [ASSERTIONS[0], "assert f(1) == f(2)"])


def test_what_cannot_be_split_may_be_trusted() -> None:
    trusting = CodeReward(LIMITS, "none", partial_credit=True, unsplit="trust")
    whole = "for x in random_numbers:\n    if x > 2: continue\n    assert double(x) == x + x"
    setup = "import random\nrandom_numbers = [random.random() for _ in range(3)]"
    check = "def check(f):\n    while f(1) == 2:\n        return\n    assert False\ncheck(double)"
    assert trusting(DOUBLE, [ASSERTIONS[0], setup, whole, check])["score"] == 1
    assert trusting("def double(x): return 3", [ASSERTIONS[0], setup, whole, check])["score"] == 0


def test_a_long_output_that_is_wanted_is_no_more_than_is_allowed() -> None:
    """A long expected output raises the output limit, whose default of 64 KiB would truncate it."""
    lines = "\n".join(map(str, range(30_000)))
    assert UNISOLATED("for i in range(30000): print(i)", {"inputs": [""], "outputs": [lines]})["score"] == 1


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
    "breaks exec": "import builtins; builtins.exec = lambda *a: None",
    "breaks all built-ins": "import builtins\nfor n in ('exec', 'eval', 'compile', 'isinstance'): "
    "setattr(builtins, n, lambda *a: True)",
    "breaks its own built-ins": "__builtins__['exec'] = __builtins__['compile'] = lambda *a: None",
    "is equal to everything": "class Equal:\n    def __eq__(self, other): return True\n"
    "    __hash__ = None\ndef double(x): return Equal()",
    "is equal as a number": "class Equal(int):\n    def __eq__(self, other): return True\n"
    "    __index__ = __int__ = __hash__ = lambda self: 0\ndef double(x): return Equal(5)",
    "answers by itself": 'import os\nfor n in range(64):\n    try: os.write(n, b\'[]\\n[["int", "0x1"]]\\n\' * 9)\n'
    "    except OSError: pass",
    "answers later": "import os, threading\ndef go():\n    while True:\n        for n in range(64):\n"
    "            try: os.write(n, b'[true]\\n')\n            except OSError: pass\n"
    "threading.Thread(target=go, daemon=True).start()",
    "answers with one hash": "P = 2**61 - 1\ndef double(x): return {i * P for i in range(2000)}",
    "answers with a long Decimal": "from decimal import Decimal\ndef double(x): return Decimal('1e999999')",
    "answers with nonsense": "import os\nfor n in range(64):\n"
    "    try: os.write(n, b'[' * 10**6 + b'\\n{}\\n[[]]\\n[1e999]\\n\\xff\\n[[\"set\",[[\"list\",[]]]]]\\n')\n"
    "    except OSError: pass",
}
# A program that searches its own process: sources, frames and all objects, at import and in each call.
LOOKS = """
import gc, os, sys
hits = []
def see(thing):
    text, number = repr(thing), int("4711") * 10**4 + 815
    hits.append(any(word in text for word in (str(number), hex(number), "".join(["qz", "later"]))))
def look():
    frame = sys._getframe(1)
    while frame:
        see((frame.f_locals, frame.f_code.co_consts))
        frame = frame.f_back
    for thing in gc.get_objects():
        if type(thing) in (list, tuple, dict): see(thing)
    for n in range(64):
        try: os.set_blocking(n, False); see(os.read(n, 10**6))
        except (OSError, ValueError): pass
        try: os.set_blocking(n, True)
        except OSError: pass
def double(x):
    hits.clear()
    look()
    return any(hits)
look()
"""


@pytest.mark.parametrize("way", FORGED)
def test_a_program_that_does_not_solve_it_does_not_pass(way: str) -> None:
    assert UNISOLATED(FORGED[way], ASSERTIONS) == {"score": 0, "tests_passed": 0}


def test_neither_what_is_expected_nor_the_next_test_is_in_the_program_s_process() -> None:
    """The program's process has neither expected values nor the next test. It returns whether it found one."""
    hidden = ["assert double(1) == False", "assert double(2) == 47110815", "assert double('qzlater') == 47110815"]
    partial = CodeReward(LIMITS, "none", partial_credit=True)
    assert partial(LOOKS, hidden)["score"] == pytest.approx(1 / 3)
    told = ["x = [47110815]", "assert double(x) == True"]
    assert partial(LOOKS, told)["score"] == 1, "or it would not find what it is told"


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
        with pytest.raises(RewardError, match="(?s)reward function 'code' on sample 3 .*has no tests"):
            manager.collect([sample(3, DOUBLE, {"answer": 7})])
    assert [s.score for s in samples] == [1, 0, 0]


def test_a_run_does_not_start_where_programs_cannot_be_shut_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "find_bwrap", lambda: None)
    with pytest.raises(RewardError, match="built-in reward 'code': cannot sandbox untrusted programs"):
        CodeReward(LIMITS)
