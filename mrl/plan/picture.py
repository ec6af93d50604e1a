"""Placement of ranks and engines as an SVG: a row a node, a square a rank, coloured by pipeline stage, engines
framed.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from mrl.plan.places import Places
from mrl.plan.workload import Model

CELL, GAP, MARGIN, LABEL, LINE = 74, 6, 16, 64, 12
STAGES = ("#cfe3f7", "#d9efd0", "#fbe3c0", "#f2cfd6", "#ddd3ee", "#cdebe7", "#efe6b8", "#e3d6cb")
FRAME, INK = "#b5482a", "#222222"
LETTER = 7  # width of a title's letter, at least


def draw(places: Places) -> str:
    """Returns a complete SVG document with a block for each layout of the run's models."""
    height, width = MARGIN, 2 * MARGIN + LABEL + _columns(places) * (CELL + GAP)
    body: list[str] = []
    for model in _layouts(places):
        title = _title(places, model)
        width = max(width, 2 * MARGIN + LETTER * len(title))
        body.append(_text(MARGIN, height + 14, title, 13))
        top = height + 24
        for rank in range(places.world):
            body += _rank(places, model, rank, top)
        for node, engines in places.beside.items():
            for number, engine in enumerate(engines):
                body += _engine(places, node, number, engine, top)
        height = top + places.nodes * (CELL + GAP) + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>", ""])


def _layouts(places: Places) -> list[Model]:
    """The first model of each layout."""
    found: list[Model] = []
    for model in places.models.values():
        if all(model.layout != other.layout for other in found):
            found.append(model)
    return found


def _title(places: Places, model: Model) -> str:
    same = [other.name for other in places.models.values() if other.layout == model.layout]
    colours = "; colours are pipeline stages" if model.layout.pipeline > 1 else ""
    frames = "; frames are engines" if places.engine_of or places.beside else ""
    return f"{', '.join(same)}: {model.words}{colours}{frames}"


def _columns(places: Places) -> int:
    return min(places.per_node, places.world) + max(map(len, places.beside.values()), default=0)


def _rank(places: Places, model: Model, rank: int, top: int) -> Iterator[str]:
    node, column = divmod(rank, places.per_node)
    seat, engine = model.grid.seat(rank), places.engine_of.get(rank)
    words = [f"rank {rank}", f"tp {seat.tp}  pp {seat.pp}", f"dp {seat.dp}  cp {seat.cp}"]
    words += [f"ep {seat.ep}"] if model.layout.expert > 1 else []
    words += [f"engine {engine}"] if engine is not None else []
    if column == 0:
        yield _text(MARGIN, top + node * (CELL + GAP) + CELL // 2, f"node {node}", 12)
    yield from _cell(node, column, top, STAGES[seat.pp % len(STAGES)], engine is not None, words)


def _engine(places: Places, node: int, number: int, engine: int, top: int) -> Iterator[str]:
    column = min(places.per_node, places.world) + number
    yield from _cell(node, column, top, "white", True, [f"engine {engine}"])


def _cell(node: int, column: int, top: int, colour: str, framed: bool, words: list[str]) -> Iterator[str]:
    x, y = MARGIN + LABEL + column * (CELL + GAP), top + node * (CELL + GAP)
    frame = f' stroke="{FRAME}" stroke-width="2"' if framed else ""
    yield f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="5" fill="{colour}"{frame}/>'
    for number, word in enumerate(words):
        yield _text(x + 6, y + 14 + number * LINE, word, 11 if number == 0 else 10)


def _text(x: int, y: int, words: str, size: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{INK}">{escape(words)}</text>'
