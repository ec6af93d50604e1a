"""Results as a table, and as a separate page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from mrl.observe import html

SHOWN_ROWS = 50
SHOWN_LINES, LINE_CHARS = 3, 160


def _cells(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields (name, value, interval)."""
    for name, value in found.get("metrics", {}).items():
        yield name, f"{value:.6g}", ""
    for name, estimate in found.get("estimates", {}).items():
        yield name, f"{estimate['value']:.4f}", f"{estimate['low']:.4f} - {estimate['high']:.4f}"
    if "of" in found:
        yield "prompts scored", f"{found['scored']} of {found['of']}", ""


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields text lines: name, value and 95 % interval; then some answers with their scores."""
    cells = list(_cells(found))
    width = max(len(name) for name, _, _ in cells)
    for name, value, interval in cells:
        yield f"{name:{width}}  {value:>12}  {interval}".rstrip()
    for row in found.get("samples", [])[:SHOWN_LINES]:
        yield f"\nprompt    {_short(row['prompt'], end=True)}"
        yield f"response  {_short(row['responses'][0])}  (score {row['scores'][0]:g})"


def _short(text: str, end: bool = False) -> str:
    """Returns the text in one line; a long text is cut to its beginning, or its end."""
    line = repr(text)[1:-1]
    if len(line) <= LINE_CHARS:
        return line
    return f"...{line[-LINE_CHARS:]}" if end else f"{line[:LINE_CHARS]}..."


def page(found: Mapping[str, Any]) -> str:
    """Returns the page as HTML: the table, and the first samples with their scores."""
    head = f'<header><h1>Evaluation</h1><span class="sub">{escape(found["weights"])}, {escape(found["data"])}</span>'
    table = html.table(("", "value", "95 % interval"), list(_cells(found)))
    rows = [
        (row["prompt"], "\n".join(f"{s:g}: {t}" for s, t in zip(row["scores"], row["responses"], strict=True)))
        for row in found.get("samples", [])[:SHOWN_ROWS]
    ]
    samples = f'<h2>Samples</h2><div class="card wide">{html.table(("prompt", "score: response"), rows)}</div>'
    return html.page(
        "Evaluation", [f"{head}</header>", f'<div class="card">{table}</div>', samples if rows else ""], None
    )
