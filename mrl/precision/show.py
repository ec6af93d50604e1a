"""The comparison as text for a terminal, and as an SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from mrl.precision.measure import CLIP, RecipeErrors

HEADS = ("", "log-prob error", "largest", "ratio error", f"beyond {CLIP:g}", "gradient cosine", "its length")
PANELS = ("log-prob error, nats", "PPO ratio error", "gradient: 1 - cosine")
LABEL, BAR, LINE, MARGIN, GAP = 170, 150, 18, 14, 84
INK, FILL = "#222222", "#6f9fd0"


def lines(rows: Sequence[RecipeErrors]) -> list[str]:
    """Returns a table with one line per row; values are means over tokens unless the heading says largest."""
    cells = [HEADS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADS))]
    rows_of_text = [[text.rjust(width) for text, width in zip(line, widths, strict=True)] for line in cells]
    return ["  ".join([line[0].strip().ljust(widths[0]), *line[1:]]) for line in rows_of_text]


def _cells(row: RecipeErrors) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.log_prob:.5f}",
        f"{row.log_prob_worst:.4f}",
        f"{row.ratio:.5f}",
        f"{row.clipped:.2%}",
        f"{row.cosine:.5f}",
        f"{row.length:.3f}",
    )


def picture(rows: Sequence[RecipeErrors], title: str) -> str:
    """Returns a complete SVG document: one bar per row, in one panel each for log-probs, ratios and the gradient's
    direction.
    """
    height = 2 * MARGIN + LINE * (len(rows) + 2)
    width = 2 * MARGIN + LABEL + len(PANELS) * (BAR + GAP)
    body = [_text(MARGIN, MARGIN + 10, title, 13)]
    body += [_text(MARGIN, _y(i) + 12, row.name, 11) for i, row in enumerate(rows)]
    for number, panel in enumerate(PANELS):
        values = [(row.log_prob, row.ratio, 1 - row.cosine)[number] for row in rows]
        body += _panel(MARGIN + LABEL + number * (BAR + GAP), panel, values)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>", ""])


def _panel(x: int, name: str, values: Sequence[float]) -> Iterator[str]:
    most = max([*values, 1e-12])
    yield _text(x, MARGIN + LINE + 12, name, 11)
    for i, value in enumerate(values):
        length = max(1.0, BAR * value / most)
        yield f'<rect x="{x}" y="{_y(i) + 3}" width="{length:.1f}" height="{LINE - 6}" fill="{FILL}"/>'
        yield _text(x + int(length) + 4, _y(i) + 12, f"{value:.2g}", 10)


def _y(row: int) -> int:
    return MARGIN + LINE * (row + 2)


def _text(x: int, y: int, words: str, size: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{INK}">{escape(words)}</text>'
