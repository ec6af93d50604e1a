"""Built-in rewards on a response's form, with the settings of their section. They need no answer."""

from __future__ import annotations

import re


def format(response: str, response_tokens: int, *, pattern: str) -> float:
    """Returns 1.0 if the stripped response matches `pattern` as a whole ("." is any character)."""
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)


def length(response: str, response_tokens: int, *, full_tokens: int, zero_tokens: int) -> float:
    """Returns 1.0 at and beyond `full_tokens`, seen from `zero_tokens`, 0.0 at and beyond `zero_tokens`; linear
    between.
    """
    return min(1.0, max(0.0, (response_tokens - zero_tokens) / (full_tokens - zero_tokens)))


def overlong(
    response: str, response_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty_factor: float
) -> float:
    """Returns DAPO's soft overlong punishment (arXiv 2503.14476): min(-(len - (max - buffer)) / buffer * factor, 0)."""
    excess = response_tokens - (max_tokens - buffer_tokens)
    return min(-excess / buffer_tokens * penalty_factor, 0.0)
