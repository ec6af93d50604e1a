"""Built-in reward "code": the response's program against the row's tests, each run in the sandbox.

Tests with inputs and outputs cannot be cheated: what is expected never enters the sandbox. Assertions share an
interpreter with the program that they test. One that ends early or prints what it likes passes none of them, but one
that looks for the tests in its own process, or returns an object equal to everything, can still pass.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mrl.reward.errors import RewardError
from mrl.reward.sandbox import Limits, SandboxError, run_python
from mrl.reward.sandbox.run import Isolation, check_isolation

_LANGUAGES = ("", "py", "python", "python3")
_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)

# What reports the tests is taken before the program runs, which sees neither stdin nor the report's file.
_ASSERTIONS = """\
def main():
    import json, os, sys
    dup, dup2, write, opened, devnull, rdonly = os.dup, os.dup2, os.write, os.open, os.devnull, os.O_RDONLY
    job, report = json.load(sys.stdin), dup(1)
    dup2(opened(devnull, os.O_WRONLY), 1)
    dup2(opened(devnull, rdonly), 0)
    names = {"__name__": "solution"}
    try:
        exec(compile(job["program"], "solution.py", "exec"), names)
    except BaseException as error:
        print(repr(error)[:500], file=sys.stderr)
        return
    for number, test in enumerate(job["tests"]):
        try:
            exec(compile(test, f"test {number}", "exec"), names)
        except BaseException as error:
            print(f"test {number}: {error!r}"[:500], file=sys.stderr)
        else:
            write(report, f"{job['secret']} {number}\\n".encode())
main()
"""


@dataclass(frozen=True)
class CodeReward:
    """f(response, answer): 1.0 if the program passes every test; with `partial_credit` the share that it passes.

    The program is the last fenced block of Python (or of no named language) in the response; without any block the
    whole response. `answer` (or JSON text of it) is {"inputs": [...], "outputs": [...]}: what the program reads from
    stdin and has to print, compared line by line without the white space at their ends; or Python text, or a list of
    it, run after the program: each passes if it raises nothing. All tests of a response together have `limits.wall_s`.
    """

    limits: Limits
    isolation: Isolation = "bubblewrap"
    partial_credit: bool = False

    def __post_init__(self) -> None:
        try:
            check_isolation(self.isolation)
        except SandboxError as error:
            raise RewardError(f"built-in reward 'code': {error}") from error

    def __call__(self, response: str, answer: Any) -> dict[str, float]:
        tests = read_tests(answer)
        program = extract_program(response)
        passed = sum(self._run(program, tests)) / len(tests)
        return {"score": passed if self.partial_credit else float(passed == 1), "tests_passed": passed}

    def _run(self, program: str, tests: list[str] | list[tuple[str, str]]) -> Iterator[bool]:
        deadline = time.monotonic() + self.limits.wall_s
        if isinstance(tests[0], str):
            yield from self._assertions(program, tests)
            return
        for given, wanted in tests:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            ended = run_python(program, given, limits=replace(self.limits, wall_s=left), isolation=self.isolation)
            yield ended.ok and _lines(ended.stdout) == _lines(wanted)

    def _assertions(self, program: str, tests: list[Any]) -> Iterator[bool]:
        """A line with a secret for each test that passed: the program cannot guess it."""
        secret = secrets.token_hex(16)
        job = json.dumps({"program": program, "tests": tests, "secret": secret})
        lines = run_python(_ASSERTIONS, job, limits=self.limits, isolation=self.isolation).stdout.splitlines()
        return (f"{secret} {number}" in lines for number in range(len(tests)))


def make(isolation: Isolation, partial_credit: bool, **limits: Any) -> CodeReward:
    """Of the keys of reward.code."""
    return CodeReward(Limits(**limits), isolation, partial_credit)


def extract_program(response: str) -> str:
    blocks = [text for language, text in _BLOCK.findall(response) if language.lower() in _LANGUAGES]
    return blocks[-1] if blocks else response


def read_tests(answer: Any) -> list[str] | list[tuple[str, str]]:
    """The answer's tests; ValueError that says what it should have been."""
    if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
        try:
            answer = json.loads(answer)
        except ValueError:
            pass  # Python that begins with a list
    if isinstance(answer, str):
        answer = [answer]
    if isinstance(answer, dict) and isinstance(answer.get("inputs"), list) and isinstance(answer.get("outputs"), list):
        inputs, outputs = answer["inputs"], answer["outputs"]
        if inputs and len(inputs) == len(outputs) and all(isinstance(text, str) for text in (*inputs, *outputs)):
            return list(zip(inputs, outputs, strict=True))
        raise ValueError(f"{len(inputs)} inputs, {len(outputs)} outputs: expected one text of each for every test")
    if isinstance(answer, list) and answer and all(isinstance(test, str) and test.strip() for test in answer):
        return answer
    raise ValueError(
        f"the answer {str(answer)[:80]!r} holds no tests: expected Python text, a list of it, or "
        '{"inputs": [...], "outputs": [...]}'
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
