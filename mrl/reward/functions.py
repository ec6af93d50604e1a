"""Built-in rewards; standard library only. They take (response, answer), where the answer is the row's, or, for the
form of a response, (response, its tokens) and the settings of their section.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from mrl.reward.extract import final_answers

_MINUS = "\N{MINUS SIGN}"
# a sign counts only where it cannot be a minus between two numbers, as in "7-2"
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?")
_FRACTION = re.compile(r"([-+]?)\s*(?:\\[dt]?frac\{([-\d.]+)\}\{([-\d.]+)\}|(\d+)\s*/\s*(\d+))")
_CALCULATION = re.compile(r"(?:[A-Za-z]\w?\s*=)?[\d\s+\-*/×÷^().,=]*")
_LATEX = re.compile(r"\\(?:[a-zA-Z]+(?=\{)|[$!,;: ])|[{}$*_]")

_CHOICE = re.compile(r"\s*\(?([A-Ja-j])(?![A-Za-z0-9])")
_LETTER = re.compile(r"[\s(\"']*([A-J])(?![A-Za-z0-9'])")
_ALONE = re.compile(r"[\W_]*([A-Ja-j])[\W_]*")


def exact_match(response: str, answer: str) -> float:
    """Returns 1.0 if the response equals the answer, ignoring white space at the ends."""
    return float(response.strip() == answer.strip())


def sorted_digits(response: str, answer: str) -> dict[str, float]:
    """Returns the mean of exact match (0 or 1) and the fraction of right positions, and both values by themselves.

    For the task "31542=" -> "12345.": one trailing full stop is not compared, since the model stops at it. Positions
    are the answer's; characters beyond it earn nothing and spoil the exact match.
    """
    got, want = response.strip().removesuffix("."), answer.strip().removesuffix(".")
    exact = float(got == want)
    right = sum(a == b for a, b in zip(got, want, strict=False)) / len(want) if want else exact
    return {"score": (exact + right) / 2, "exact_match": exact, "right_positions": right}


def multiple_choice(response: str, answer: str) -> float:
    r"""Returns 1.0 if the response's choice, one letter A to J, is the answer's ("B", "(b)", "B) Paris").

    The response's choice is its last \boxed{B}, else its last "answer is B" or "answer: (B)", else the response itself
    if it is nothing more ("B", "(B).", "**B**"); see `mrl.reward.extract`. Raises ValueError for an answer without a
    letter.
    """
    want = _CHOICE.match(answer)
    if want is None:
        raise ValueError(f"the answer {answer!r} does not begin with a letter A to J")
    return float(chosen(response) == want[1].upper())


def chosen(response: str) -> str | None:
    """Returns the letter, in upper case, that `multiple_choice` reads; None if it finds none."""
    for final in final_answers(response):
        text = _LATEX.sub("", final.text).strip()
        found = _ALONE.fullmatch(text) or (_LETTER.match(text) if final.is_marked else None)
        if found is not None:
            return found[1].upper()
    return None


def last_number(text: str) -> Decimal | None:
    """Returns the last number in the text ("1,234.50", "-3", ".5", "2e3"); None if there is none."""
    found = _NUMBER.findall(text.replace(_MINUS, "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def final_number(text: str) -> Decimal | Fraction | None:
    """Returns the number of a final answer: 42 for "42 (6 * 7)", 7 for "3 + 4 = 7", 42 for "she has 42"; else None."""
    text = text.replace(_MINUS, "-").strip()
    if (fraction := _FRACTION.fullmatch(text)) is not None:
        sign, *parts = fraction.groups()
        try:
            over, under = (Fraction(part) for part in parts if part is not None)
            return over / under * (-1 if sign == "-" else 1)
        except (ValueError, ZeroDivisionError):
            return None
    text = _LATEX.sub("", text).strip()
    beginning = _CALCULATION.match(text)[0]  # type: ignore[index]
    number = _NUMBER.search(beginning.rpartition("=")[2]) or _NUMBER.search(text[: len(beginning) + 1])
    return Decimal(number[0].replace(",", "")) if number else last_number(text)


def arithmetic(response: str, answer: str) -> float:
    """Returns 1.0 if the response's final number equals the answer's ("72" or "... #### 72").

    The final number is that of the last \\boxed{}, else of the last `#### 72`, else of the last "the answer is 72",
    else the last number; see `mrl.reward.extract`. Compared as decimals: 0.10 is 0.1, and 0.30000000000000004 is not
    0.3. Raises ValueError for an answer without a number.
    """
    want = number_of(answer)
    if want is None:
        raise ValueError(f"the answer {answer!r} contains no number")
    return float(number_of(response) == want)


def number_of(text: str) -> Decimal | Fraction | None:
    """Returns the number that `arithmetic` reads; None if it finds none."""
    found = (final_number(final.text) if final.is_marked else last_number(final.text) for final in final_answers(text))
    return next((number for number in found if number is not None), None)


# ---- the form of a response


def format(response: str, response_tokens: int, *, pattern: str) -> float:
    """Returns 1.0 if the stripped response matches `pattern` as a whole ("." is any character)."""
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)


def length(response: str, response_tokens: int, *, full_tokens: int, zero_tokens: int) -> float:
    """Returns 1.0 at and beyond `full_tokens`, seen from `zero_tokens`; 0.0 at and beyond that; linear between."""
    return min(1.0, max(0.0, (response_tokens - zero_tokens) / (full_tokens - zero_tokens)))


def overlong(
    response: str, response_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty_factor: float
) -> float:
    """Returns DAPO's soft overlong punishment (arXiv 2503.14476): min(-(len - (max - buffer)) / buffer * factor, 0)."""
    excess = response_tokens - (max_tokens - buffer_tokens)
    return min(-excess / buffer_tokens * penalty_factor, 0.0)
