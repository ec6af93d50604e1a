"""Built-in rewards on plain strings; standard library only. Each takes (response, answer): the answer is the row's."""

from __future__ import annotations

import re
from decimal import Decimal

_MINUS = "\N{MINUS SIGN}"
# a sign counts only where it cannot be a minus between two numbers, as in "7-2"
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?")

_CHOICE = re.compile(r"\s*\(?([A-Ja-j])(?![A-Za-z0-9])")
_LETTER = r"[\s(*$\"']*([A-J])(?![A-Za-z0-9'])"
_CHOSEN = (
    re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-Ja-j])\)?\s*\}"),
    re.compile(rf"(?i:\banswer(?:\s+is\s*:?|\s*:)|<answer>){_LETTER}"),
    re.compile(r"^[\s(*]*([A-Ja-j])[\s).:*]*$"),
)


def exact_match(response: str, answer: str) -> float:
    """1.0 if the response is the answer, white space at the ends apart."""
    return float(response.strip() == answer.strip())


def sorted_digits(response: str, answer: str) -> dict[str, float]:
    """The mean of exact match (0 or 1) and the fraction of right positions, both also reported by themselves.

    For the task "31542=" -> "12345.": one full stop at the end is not compared, since it is what the model stops at.
    Positions are the answer's; characters beyond it earn nothing and spoil the exact match.
    """
    got, want = response.strip().removesuffix("."), answer.strip().removesuffix(".")
    exact = float(got == want)
    right = sum(a == b for a, b in zip(got, want, strict=False)) / len(want) if want else exact
    return {"score": (exact + right) / 2, "exact_match": exact, "right_positions": right}


def multiple_choice(response: str, answer: str) -> float:
    r"""1.0 if the response's choice, one letter A to J, is the answer's ("B", "(b)", "B) Paris").

    The response's choice is its last \boxed{B}, else its last "answer is B" or "answer: (B)", else the response itself
    if it is nothing more ("B", "(B).", "**B**"). Raises ValueError for an answer without a letter.
    """
    want = _CHOICE.match(answer)
    if want is None:
        raise ValueError(f"the answer {answer!r} begins with no letter A to J")
    return float(chosen(response) == want[1].upper())


def chosen(response: str) -> str | None:
    """The letter, in upper case, that `multiple_choice` reads; None if it finds none."""
    for pattern in _CHOSEN:
        found = pattern.findall(response)
        if found:
            letter: str = found[-1]
            return letter.upper()
    return None


def last_number(text: str) -> Decimal | None:
    """The last number in the text ("1,234.50", "-3", ".5", "2e3"); None if there is none."""
    found = _NUMBER.findall(text.replace(_MINUS, "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def arithmetic(response: str, answer: str) -> float:
    """1.0 if the last number of the response equals the last number of the answer ("72" or "... #### 72").

    Compared as decimals: 0.10 is 0.1, and 0.30000000000000004 is not 0.3. Raises ValueError for an answer without one.
    """
    want = last_number(answer)
    if want is None:
        raise ValueError(f"the answer {answer!r} holds no number")
    return float(last_number(response) == want)
