"""HTML building blocks and style of a run's page."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { --ink: #1f2933; --soft: #5b6675; --line: #e4e8ee; --page: #f6f7f9; --accent: #3b6ea8; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 32px 24px 64px; }
header { display: flex; align-items: baseline; gap: 16px; flex-wrap: wrap; margin-bottom: 20px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 18px; margin: 36px 0 12px; }
.sub { color: var(--soft); } .empty { color: var(--soft); padding: 24px 0; }
.badge { font-size: 12px; font-weight: 600; padding: 2px 10px; border-radius: 999px; background: #e3ecf7;
         color: var(--accent); }
.badge.done { background: #e2f2e8; color: #2f7a4b; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 12px; }
.card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; min-width: 0; }
.tile b { display: block; font-size: 19px; font-weight: 600; white-space: nowrap; }
.tile span { color: var(--soft); font-size: 13px; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(440px, 1fr)); gap: 16px; }
.grid h3 { margin: 0; font-size: 15px; } .grid p { margin: 0 0 6px; font-size: 12.5px; color: var(--soft); }
.grid img { width: 100%; height: auto; display: block; }
.grid table { margin-top: 4px; font-size: 13px; } .grid th { font-size: 12px; }
.grid .card { overflow-x: auto; } .grid th, .grid td { padding: 5px 10px 5px 0; }
.whole { margin-top: 16px; overflow-x: auto; } .whole img { display: block; }
.wide { overflow-x: auto; padding: 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 600; font-size: 13px; }
th, td { padding: 8px 14px; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { font-family: ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.turn { display: block; } .told { color: #9a5fa8; padding-left: 14px; }
.answers { table-layout: fixed; min-width: 720px; } .answers th:nth-child(2) { width: 12%; }
.score { display: block; width: fit-content; margin-bottom: 4px; font-size: 12px; border-radius: 6px; padding: 1px 7px;
         background: #fbe6e3; color: #a13c2c; }
.score.some { background: #faf0d7; color: #8a6413; } .score.full { background: #e2f2e8; color: #2f7a4b; }
td.text img { display: block; max-width: 160px; max-height: 160px; image-rendering: pixelated; margin-bottom: 6px; }
pre { margin: 0; font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-x: auto; }
summary { cursor: pointer; color: var(--accent); }
@media (max-width: 520px) { .grid { grid-template-columns: 1fr; } main { padding: 20px 14px; } }
"""


def page(title: str, sections: Iterable[str], refresh_s: float | None) -> str:
    """Returns a complete document. refresh_s: seconds after which a browser reloads it; None: never"""
    again = f'<meta http-equiv="refresh" content="{max(1, round(refresh_s))}">' if refresh_s is not None else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'{again}<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main></body></html>\n"
    )


def card(title: str, note: str, inside: str) -> str:
    """Returns a card. inside: HTML below a title and a line of text"""
    return f'<div class="card"><h3>{escape(title)}</h3><p>{escape(note) or "&nbsp;"}</p>{inside}</div>'


def picture(title: str, data: bytes, kind: str = "svg+xml") -> str:
    """Returns an <img> with the SVG (or PNG) embedded, which cannot run or load anything."""
    return f'<img alt="{escape(title)}" src="data:image/{kind};base64,{base64.b64encode(data).decode()}">'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of plain text by rows; all columns but the first hold numbers. An empty column is left out."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    kinds = ["" if i == 0 else ' class="number"' for i in range(len(head))]
    top = "".join(f"<th{kinds[i]}>{escape(head[i])}</th>" for i in kept)
    body = "".join("<tr>" + "".join(f"<td{kinds[i]}>{escape(row[i])}</td>" for i in kept) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"
