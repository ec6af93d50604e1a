"""What a look at one thing gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True)
class Finding:
    """text: what was seen, or what is wrong and where (file, row, key); remedy: what to do, where the text has not said
    it; skipped: could not be looked at here."""

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


def problems(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict == "problem"]
