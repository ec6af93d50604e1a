"""Built-in reward "code": the response's program against the row's tests, each run in the sandbox.

Expected values never enter the sandbox: a program prints or returns a value, and that is compared outside. The program
can answer anything, but does not know what would pass.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mrl.reward import extract
from mrl.reward.assertions import Statement, Step, Test, split_tests
from mrl.reward.errors import RewardError
from mrl.reward.plain_values import decode, evaluate
from mrl.reward.python_text import asked_names
from mrl.reward.sandbox import Limits, SandboxError, converse_with_python, run_python
from mrl.reward.sandbox.run import START_S, Isolation, check_isolation
from mrl.reward.sandbox.watch import Talk

ANSWER_CALLS = Path(__file__).with_name("answer_calls.py").read_text()
VALUES_KIB = 16384  # of all that a program's calls return, beside output_kib; more fails, as with every other limit


@dataclass(frozen=True)
class CodeReward:
    """f(response, answer): 1.0 if the program passes every test; with `partial_credit` the share of tests that it
    passes.

    `mrl.reward.extract.program` finds the program in the response: the last fenced block of Python that defines the
    functions that the tests call. `answer` (or JSON text of it) is {"inputs": [...], "outputs": [...]}, or a list of
    {"input": ..., "output": ...}: stdin and expected stdout, compared line by line without trailing white space; or
    Python text that asserts, or a list of it. See `assertions`, also for the tests that are refused unless `unsplit` is
    "trust". All tests of a response together have `limits.wall_s`; tests with assertions share one process.
    """

    limits: Limits
    isolation: Isolation = "bubblewrap"
    partial_credit: bool = False
    unsplit: Literal["refuse", "trust"] = "refuse"

    def __post_init__(self) -> None:
        try:
            check_isolation(self.isolation)
        except SandboxError as error:
            raise RewardError(f"built-in reward 'code': {error}") from error

    def __call__(self, response: str, answer: Any) -> dict[str, float]:
        texts, pairs = read_tests(answer)
        asserted = split_tests(texts, trust=self.unsplit == "trust") if texts else []
        program = extract.program(response, asked_names(texts))
        passed = self._assertions(program, asserted) if texts else list(self._outputs(program, pairs))
        share = sum(passed) / len(asserted or pairs)
        return {"score": share if self.partial_credit else float(share == 1), "tests_passed": share}

    def _outputs(self, program: str, tests: list[tuple[str, str]]) -> Iterator[bool]:
        deadline = time.monotonic() + self.limits.wall_s
        for given, wanted in tests:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            output_kib = self.limits.output_kib + len(wanted.encode()) // 1024 + 1  # the expected output always fits
            limits = replace(self.limits, wall_s=left, output_kib=output_kib)
            ended = run_python(program, given, limits=limits, isolation=self.isolation)
            yield ended.ok and _lines(ended.stdout) == _lines(wanted)

    def _assertions(self, program: str, tests: list[Test]) -> list[bool]:
        passed: list[bool] = []
        limits = replace(self.limits, output_kib=self.limits.output_kib + VALUES_KIB)
        talk = _talk(program, tests, passed, time.monotonic() + START_S + limits.wall_s)
        converse_with_python(ANSWER_CALLS, talk, limits=limits, isolation=self.isolation)
        return passed


def _talk(program: str, tests: list[Test], passed: list[bool], deadline: float) -> Talk:
    """Sends the steps. After a failure only statements are run, as later tests may need them."""
    if (yield _request(Statement(program))) == b"null":
        return
    for test in tests:
        passes = True
        for step in test:
            if passes or isinstance(step, Statement):
                answer = yield _request(step)
                passes = _holds(step, answer) and passes
        if time.monotonic() > deadline:
            return
        passed.append(passes)


def _request(step: Step) -> bytes:
    request = {"run": step.source} if isinstance(step, Statement) else {"values": step.queries}
    return json.dumps(request).encode() + b"\n"


def _holds(step: Step, answer: bytes) -> bool:
    """Returns True if the step passed. `answer` comes from the program and is not trusted."""
    try:
        values = decode(answer)
        if values is None or isinstance(step, Statement):
            return values == []
        return len(values) == len(step.queries) and bool(evaluate(step.expression, values))
    except Exception:  # an exception fails the test, as in an assertion
        return False


def make(isolation: Isolation, partial_credit: bool, unsplit: Literal["refuse", "trust"], **limits: Any) -> CodeReward:
    """Makes the reward from the keys of reward.code."""
    return CodeReward(Limits(**limits), isolation, partial_credit, unsplit)


def check_answer(answer: Any, unsplit: Literal["refuse", "trust"]) -> None:
    """Raises ValueError, which says why and what to do, if no program can be judged by the answer."""
    texts, _ = read_tests(answer)
    if texts:
        split_tests(texts, trust=unsplit == "trust")


def read_tests(answer: Any) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the texts that assert, or (input, output) pairs, of an answer. Raises ValueError: what was expected."""
    if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
        try:
            answer = json.loads(answer)
        except (ValueError, RecursionError):
            pass  # Python that begins with a list
    if isinstance(answer, str):
        answer = [answer]
    if isinstance(answer, list) and answer and all(map(_is_pair, answer)):
        answer = {"inputs": [test["input"] for test in answer], "outputs": [test["output"] for test in answer]}
    if isinstance(answer, dict) and isinstance(answer.get("inputs"), list) and isinstance(answer.get("outputs"), list):
        inputs, outputs = answer["inputs"], answer["outputs"]
        if inputs and len(inputs) == len(outputs) and all(isinstance(text, str) for text in (*inputs, *outputs)):
            return [], list(zip(inputs, outputs, strict=True))
        what = "write calls of a function (fn_name) as Python text, such as assert f(1) == 2"
        what = what if answer.get("fn_name") else "expected one text input and one text output per test"
        raise ValueError(f"{len(inputs)} inputs, {len(outputs)} outputs: {what}")
    if isinstance(answer, list) and answer and all(isinstance(test, str) and test.strip() for test in answer):
        return answer, []
    raise ValueError(
        f"the answer {str(answer)[:80]!r} has no tests: expected Python text, a list of such texts, or "
        '{"inputs": [...], "outputs": [...]}'
    )


def _is_pair(test: Any) -> bool:
    """Returns True for {"input", "output"} of one test, as some data sets have them in a list."""
    return isinstance(test, dict) and {"input", "output"} <= test.keys() and test.get("testtype", "stdin") == "stdin"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
