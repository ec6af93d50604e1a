"""What `make test` leaves out and `make test-all` runs: tests with the mark `slow`, and the cases of `slow_cases`."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
RUN_SLOW = os.environ.get("RUN_SLOW") == "1"


def slow_cases(*cases: T) -> tuple[T, ...]:
    """For a table of cases whose fixture computes all of them: `LAYOUTS = ("tp2.pp2", *slow_cases("tp4", "cp4"))`."""
    return cases if RUN_SLOW else ()
