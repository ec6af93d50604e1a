r"""Built-in reward "math": mathematical equivalence through the math-verify library.

In a module of its own because importing it costs half a second. math-verify bounds its own work with SIGALRM, so this
must run in a process's main thread: a reward worker's is.
"""

from __future__ import annotations

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Basic, Eq


def math(response: str, answer: str) -> float:
    r"""1.0 if the response's final answer equals `answer` as mathematics ("1/2", "\frac{1}{2}" and "0.5" are equal).

    The answer may be bare or hold its own \boxed{} or $...$. In the response, \boxed{} wins over other LaTeX, and that
    over plain numbers. Of "x = 7" the right-hand side counts; with "1 = 7" the response is wrong. Raises ValueError for
    an answer that cannot be parsed.
    """
    bare = "\\boxed" not in answer and "$" not in answer
    gold = parse(f"\\boxed{{{answer}}}" if bare else answer, extraction_config=[LatexExtractionConfig()])
    if not gold:
        raise ValueError(f"math-verify cannot parse the answer {answer!r}")
    guess = parse(response, extraction_config=[LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()])
    return float(verify(gold, guess) and not any(map(_says_what_is_false, guess)))


def _says_what_is_false(guess: object) -> bool:
    """Are two numbers equal in it that are not?"""
    equations = guess.atoms(Eq) if isinstance(guess, Basic) else ()
    numbers = [(e.lhs, e.rhs) for e in equations if e.lhs.is_number and e.rhs.is_number]
    return not all(verify(left, right) for left, right in numbers)
