"""Result of one check, and results as a table, as lines and as JSON."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from mrl.redaction import redact

COLORS = {"ok": "green", "warning": "yellow", "problem": "red", "skipped": "dim"}
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


def table(findings: Sequence[Finding], source: str) -> Table:
    """Returns a table with one row a finding; each check is named once."""
    made = Table(title=f"preflight of {source} on {socket.gethostname()}", title_justify="left", show_lines=False)
    made.add_column("looked at")
    made.add_column("")
    made.add_column("found", overflow="fold")
    before = ""
    for finding in findings:
        cell = Text(redact(finding.text))
        if finding.remedy:
            cell.append(f"\n-> {redact(finding.remedy)}", style="bold" if finding.verdict == "problem" else "")
        name = "" if finding.check == before else finding.check
        made.add_row(name, Text(finding.verdict, style=COLORS[finding.verdict]), cell)
        before = finding.check
    return made


def verdict(findings: Sequence[Finding]) -> str:
    """Returns the line under the table."""
    wrong, warned = len(problems(findings)), sum(finding.verdict == "warning" for finding in findings)
    warnings = f", {warned} warning{'s' * (warned > 1)}" if warned else ""
    return f"{wrong} problem{'s' * (wrong > 1)}{warnings}" if wrong else f"ready to train{warnings}"


def as_json(findings: Sequence[Finding], source: str, exit_code: int) -> str:
    """Returns {"config", "host", "exit_code", "findings": [{"check", "verdict", "text", "remedy"}, ...]}."""
    rows = [{name: redact(value) for name, value in vars(finding).items()} for finding in findings]
    head = {"config": source, "host": socket.gethostname(), "exit_code": exit_code}
    return json.dumps({**head, "findings": rows}, indent=1)
