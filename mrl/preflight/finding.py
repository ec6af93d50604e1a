"""Result of one check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    text: what was seen, or the mistake and its place (file, row, key); remedy: what to do, unless the text says it;
    verdict "skipped": the check is impossible here
    """

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


def problems(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict == "problem"]
