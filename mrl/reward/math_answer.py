r"""Built-in reward "math": mathematical equivalence by the math-verify library.

A separate module, because importing that library takes half a second. math-verify limits its time with SIGALRM, so it
must run in a process's main thread, as in a reward worker.

`mrl.reward.extract` finds the answer in a response. Forms that math-verify 0.9.0 misreads are rewritten first
(`_plain`): currency, `1e3` (e is Euler's number to it), `1 234` (1 + 234), `1\,234`, `10_000`, `0.\overline{3}`, `½`,
`√3`, `sqrt(3)`, `°`, `\approx`, words after a number. Answers that are words are compared as words (`yes` is e*s*y to
it, which equals `eys`).
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException
from sympy import Basic, Eq

from mrl.reward.errors import NoVerdict
from mrl.reward.extract import boxed_answer, final_answers, hash_marked_answer

LIMIT_S = 5  # of one reading or comparison
MAX_CHARS = 2000  # of a final answer: nothing longer is read
_BOX, _ANY = LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()
_SIGNS = {
    "−": "-", "–": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ",
    "°": r"^\circ ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "≈": r"\approx ", "⁄": "/", "、": ",", "。": ".", "²": "^2", "³": "^3", "∅": r"\emptyset ", "**": "^",
}  # fmt: skip
_CURRENCY = re.compile(r"\\?\$|[€£¥₹₽₩]|\\(?:euro|pounds|yen)\b")
_DELIMITERS = re.compile(r"\\[()\[\]]")
_THOUSANDS = re.compile(
    r"(?<![\d.])\d{1,3}(?:(?P<sep>\{,\}|\\!,\\!|,\\!|\\,|\\;|\\ |[ _])\d{3}(?!\d))(?:(?P=sep)\d{3}(?!\d))*"
)
_POINTS = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.])")
_LABEL = re.compile(r"^(?:\\text(?:bf)?\{)?\(?([A-J])\)\s*\}?(?:\\ )?\s*")  # of a choice: (B) 12
_MARKS = re.compile(r"\\(?:checkmark|blacksquare|square|qed)\b|[`\"✓✅■]")
_EXPONENT = re.compile(r"(?<![\w.])(-?\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\w.])")
_REPEATING = re.compile(r"(?<!\d)(\d+)\.(\d*)\\(?:overline|bar)\{(\d+)\}")
_PROSE = re.compile(
    r"(?<![\\A-Za-z{])(?!(?:and|or|sin|cos|tan|cot|sec|csc|log|ln|pi|sqrt|frac|min|max)\b)[A-Za-z]{2,}|[\u0400-\u1fff\u3040-\uffdc]"
)
_WORDS = re.compile(r"(?=.*[A-Za-z]{2})[A-Za-z][A-Za-z ,.'-]*")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname|mbox)\s*\{([^{}]*)\}")
_PAIR = re.compile(r"(?<![\\$])\$(?!\$)([^$\n]*?)(?<!\\)\$(?!\d)")


def math(response: str, answer: str) -> float:
    r"""Returns 1.0 if the response's final answer equals `answer` mathematically ("1/2", "\frac{1}{2}" and "0.5" are
    equal).

    The answer may be bare, an amount of money, or hold its own \boxed{}, `####` or $...$. In the response, the last
    \boxed{} counts, else `####`, else "the answer is", else the last LaTeX or number. For "x = 7" the right-hand side
    counts; with "1 = 7" the response is wrong. Raises ValueError for an unreadable answer, and NoVerdict if math-verify
    reaches no verdict.
    """
    gold = read_answer(answer)
    for final in final_answers(response):
        if words := _words(_marked(answer)):
            return float(words == _words(final.text))
        if guess := _read(final.text) if final.is_marked else _loose(final.text):
            return float(_equal(answer, gold, final.text, guess))
    return 0.0


def read_answer(answer: str) -> list[Any]:
    """Returns the answer of a row as math-verify reads it. Raises ValueError if it cannot."""
    gold = _read(_marked(answer))
    if _words(_marked(answer)) or (gold and not isinstance(gold[0], str)):
        return gold
    raise ValueError(f"math-verify cannot parse the answer {answer!r}")


def _marked(answer: str) -> str:
    """Returns the part of a row's answer that is compared."""
    return boxed_answer(answer) or hash_marked_answer(answer) or answer


def _equal(answer: str, gold: list[Any], text: str, guess: list[Any]) -> bool:
    label = _LABEL.match(text)
    if label is not None and text[label.end() :].strip():  # a choice's letter and what it stands for
        if _plain(_TEXT.sub(r"\1", _marked(answer))).strip("() ") == label[1]:
            return True
        text = text[label.end() :]
        guess = _read(text)
    if not guess or isinstance(guess[0], str):
        return False
    plain, wanted = _plain(text), _plain(_marked(answer))
    if re.fullmatch(r"-?\d+,\d+", plain) and re.fullmatch(r"-?\d+\.\d+", wanted):
        guess = _read(plain.replace(",", "."))  # a decimal comma
    if plain != wanted and plain.removesuffix(r"\%") == wanted.removesuffix(r"\%"):
        return True  # 12.5% and 12.5, as math-verify has it of 12% and 12
    try:
        return _same(gold, guess) and not any(map(_says_what_is_false, guess))
    except TimeoutException:
        raise NoVerdict(f"math-verify took more than {LIMIT_S} s to compare {text[:80]!r} with {answer!r}") from None
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise NoVerdict(f"math-verify cannot compare {text[:80]!r} with {answer!r} ({what})") from error


def _same(gold: Any, guess: Any) -> bool:
    found: bool = verify(gold, guess, allow_set_relation_comp=True, timeout_seconds=LIMIT_S, raise_on_error=True)
    return found


def _read(text: str) -> list[Any]:
    """Returns a final answer as math-verify reads it: [expression, text], or [text] if it cannot; [] for no text."""
    if len(text) > MAX_CHARS:
        return [text]
    plain = _plain(text)
    prose = _PROSE.search(_TEXT.sub(lambda match: " " * len(match[0]), plain))
    head = plain if prose is None else plain[: prose.start()].rstrip(" ,;:(").lstrip(" ,;:")
    remark = head.rfind("(")  # as in 19.5 (5 years ago), which is no call such as f(5
    if prose is not None and remark > max(0, head.rfind(")")) and not head[remark - 1].isalpha():
        head = head[:remark].rstrip(" ,;:")
    return _parsed(f"\\boxed{{{head}}}", [_BOX]) if head else _loose(text)


def _loose(text: str) -> list[Any]:
    """Returns the last formula or number of a text."""
    return _parsed(_without_currency(text.replace("`", "")), [_BOX, _ANY])


def _parsed(text: str, kinds: list[Any]) -> list[Any]:
    try:
        found: list[Any] = parse(text, extraction_config=kinds, parsing_timeout=LIMIT_S, raise_on_error=True)
    except TimeoutException:
        raise NoVerdict(f"math-verify took more than {LIMIT_S} s to read {text[:80]!r}") from None
    except Exception:  # noqa: BLE001 - no form that it knows
        return [text]
    return found


def _without_currency(text: str) -> str:
    """Removes dollar signs of amounts, as in "$5 and $7", but keeps those that delimit a formula."""
    text, kept, at = text.replace(r"\$", ""), [], 0
    while (match := _PAIR.search(text, at)) is not None:
        inside = match[1]
        spaced = inside[:1].isspace() + inside[-1:].isspace()
        formula = inside.strip() and spaced != 1 and not _PROSE.search(_TEXT.sub("", inside))
        kept.append(text[at : match.end()] if formula else text[at : match.start()])
        at = match.end() if formula else match.start() + 1
    rest = text[at:]
    return "".join(kept) + (rest if "$$" in rest else rest.replace("$", ""))


def _plain(text: str) -> str:
    """Rewrites a text as LaTeX that math-verify reads correctly."""
    text = "".join(unicodedata.normalize("NFKC", sign) if sign not in _SIGNS else sign for sign in text)
    text = re.sub(r"(\d*)(\d)⁄(\d+)", r"\1\\frac{\2}{\3}", text) if "⁄" in text else text
    text = _TEXT.sub(lambda match: match[1] if re.search(r"\d", match[1]) else match[0], text)
    for sign, latex in _SIGNS.items():
        text = text.replace(sign, latex)
    text = re.sub(r"(?:√|\bsqrt)\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+))", r"\\sqrt{\1\2\3}", text)
    text = _DELIMITERS.sub("", _CURRENCY.sub("", text.replace(r"\%", "%"))).replace("%", r"\%")
    text = re.sub(r"^\s*(?:\\approx|\\simeq|~)\s*|(?<![\w\\])pi\b", lambda m: r"\pi " if "pi" in m[0] else "", text)
    text = re.sub(r"(?:\\[;:, !])+\s*$", "", _MARKS.sub("", text).strip())
    text = _POINTS.sub(lambda match: match[0].replace(".", ""), text)
    text = _THOUSANDS.sub(lambda match: match[0].replace(match["sep"], ""), text)
    text = _EXPONENT.sub(r"\1\\times 10^{\2}", text)
    text = _REPEATING.sub(_fraction, text)
    return text.strip().strip("*_").rstrip(".,;").strip()


def _fraction(match: re.Match[str]) -> str:
    whole, fixed, repeated = match.groups()
    places = 10 ** len(fixed)
    value = Fraction(int(whole + fixed), places) + Fraction(int(repeated), places * (10 ** len(repeated) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _words(text: str) -> str:
    """Returns the text in lower case if it is words without mathematics; else ""."""
    text = _TEXT.sub(r"\1", text).replace("$", "").strip().strip("*_").rstrip(".").strip()
    return " ".join(text.casefold().split()) if _WORDS.fullmatch(text) and _PROSE.search(text) else ""


def _says_what_is_false(guess: object) -> bool:
    """Returns True if the expression equates two numbers that are different."""
    equations = guess.atoms(Eq) if isinstance(guess, Basic) else ()
    numbers = [(e.lhs, e.rhs) for e in equations if e.lhs.is_number and e.rhs.is_number]
    return not all(_same(left, right) for left, right in numbers)
