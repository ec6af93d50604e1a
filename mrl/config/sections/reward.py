"""Rewards."""

from __future__ import annotations

from typing import Literal

from mrl.config.sections.base import PositiveFloat, PositiveInt, Section


class RewardConfig(Section):
    """`function`: a built-in name (exact_match, sorted_digits, arithmetic, math) or `path/to/file.py:name`."""

    function: str
    workers: PositiveInt = 2
    timeout_s: PositiveFloat = 30.0
    on_error: Literal["stop", "zero"] = "stop"  # a time-out or exception: end the run, or score 0 and count it
