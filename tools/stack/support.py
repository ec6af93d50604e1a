"""Writes the table of docs/support.md of versions that run together: python -m tools.stack.support"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tools.stack.run import CHECKS, PACKAGES, RESULTS, ROOT

PAGE = ROOT / "docs" / "support.md"
HEADING = "## Versions that run together"


def table(results: Mapping[str, Any]) -> list[str]:
    """Returns the lines of the table from the content of tools/stack/results/stack.json."""
    here = {"python": results["machine"]["python"], **results["stack"]}
    verdicts = dict.fromkeys(CHECKS, "not run") | {row["check"]: row["verdict"] for row in results["checks"]}
    run = f"`make test-stack`, {results['date']}"
    for verdict in ("passed", "failed", "not run"):
        names = [name for name in verdicts if verdicts[name] == verdict]
        run += f". {verdict.capitalize()}: {'; '.join(names)}" if names else ""
    rows = [(results["other"], "every test of `make test`"), (here, run)]
    return [
        f"| Python | {' | '.join(PACKAGES)} | tested by |",
        f"|{'---|' * (len(PACKAGES) + 2)}",
        *(f"| {' | '.join(parts[name] for name in ('python', *PACKAGES))} | {tests} |" for parts, tests in rows),
    ]


def filled(text: str, results: Mapping[str, Any]) -> str:
    """Returns the page with the table replaced. Raises ValueError if the page does not have the heading."""
    before, heading, after = text.partition(f"\n{HEADING}\n")
    if not heading:
        raise ValueError(f"{PAGE} has no heading {HEADING!r}")
    lines = after.splitlines()
    places = [number for number, line in enumerate(lines) if line.startswith("|")]
    first, end = places[0], next(n for n in range(places[0], len(lines)) if not lines[n].startswith("|"))
    lines[first:end] = table(results)
    return before + heading + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), json.loads(RESULTS.read_text())))
