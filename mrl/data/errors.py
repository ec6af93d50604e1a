"""Data errors, each named by file and row."""

from __future__ import annotations

from collections.abc import Sequence

MAX_REPORTED = 10


class DataError(ValueError):
    """Unusable rows or files; one line each, with the file and the row."""


def raise_for(problems: Sequence[tuple[str, str]]) -> None:
    """Raises DataError for `problems`, pairs (where, what): the first ten, and the number of the others. Returns if
    there are none.
    """
    if not problems:
        return
    shown = [f"{where}: {what}" for where, what in problems[:MAX_REPORTED]]
    if len(problems) > MAX_REPORTED:
        shown.append(f"... and {len(problems) - MAX_REPORTED} more rows")
    raise DataError("\n".join(shown))
