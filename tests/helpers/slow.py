"""Slow tests, which `make test` leaves out and `make test-all` runs: the mark `slow`, and the cases of `slow_cases`."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
RUN_SLOW = os.environ.get("RUN_SLOW") == "1"


def slow_cases(*cases: T) -> tuple[T, ...]:
    """Returns the cases if slow tests run, else none. For tables whose fixture computes every case: `LAYOUTS =
    ("tp2.pp2", *slow_cases("tp4", "cp4"))`."""
    return cases if RUN_SLOW else ()
