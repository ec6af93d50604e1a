"""Placement of ranks and engines as an SVG: a row a node, a square a rank, coloured by pipeline stage, engines
framed.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from mrl.config.sections.models import ParallelConfig
from mrl.plan.placement import Placement
from mrl.plan.workload import PlannedModel

CELL, GAP, MARGIN, LABEL, LINE = 74, 6, 16, 64, 12
STAGES = ("#cfe3f7", "#d9efd0", "#fbe3c0", "#f2cfd6", "#ddd3ee", "#cdebe7", "#efe6b8", "#e3d6cb")
FRAME, INK = "#b5482a", "#222222"
LETTER = 7  # width of a title's letter, at least


def draw(placement: Placement) -> str:
    """Returns a complete SVG document with a block for each layout of the run's models."""
    columns = min(placement.per_node, placement.world) + max(map(len, placement.beside.values()), default=0)
    height, width = MARGIN, 2 * MARGIN + LABEL + columns * (CELL + GAP)
    body: list[str] = []
    drawn: list[ParallelConfig] = []
    for model in placement.models.values():
        if model.layout in drawn:
            continue
        drawn.append(model.layout)
        same = [other.name for other in placement.models.values() if other.layout == model.layout]
        colours = "; colours are pipeline stages" if model.layout.pipeline > 1 else ""
        frames = "; frames are engines" if placement.engine_of or placement.beside else ""
        title = f"{', '.join(same)}: {model.words}{colours}{frames}"
        width = max(width, 2 * MARGIN + LETTER * len(title))
        body.append(_text(MARGIN, height + 14, title, 13))
        top = height + 24
        for rank in range(placement.world):
            body += _rank(placement, model, rank, top)
        for node, engines in placement.beside.items():
            for number, engine in enumerate(engines):
                column = min(placement.per_node, placement.world) + number
                body += _cell(node, column, top, "white", True, [f"engine {engine}"])
        height = top + placement.nodes * (CELL + GAP) + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>", ""])


def _rank(placement: Placement, model: PlannedModel, rank: int, top: int) -> Iterator[str]:
    node, column = divmod(rank, placement.per_node)
    coords, engine = model.grid.coordinates(rank), placement.engine_of.get(rank)
    words = [f"rank {rank}", f"tp {coords.tp}  pp {coords.pp}", f"dp {coords.dp}  cp {coords.cp}"]
    words += [f"ep {coords.ep}"] if model.layout.expert > 1 else []
    words += [f"engine {engine}"] if engine is not None else []
    if column == 0:
        yield _text(MARGIN, top + node * (CELL + GAP) + CELL // 2, f"node {node}", 12)
    yield from _cell(node, column, top, STAGES[coords.pp % len(STAGES)], engine is not None, words)


def _cell(node: int, column: int, top: int, colour: str, framed: bool, words: list[str]) -> Iterator[str]:
    x, y = MARGIN + LABEL + column * (CELL + GAP), top + node * (CELL + GAP)
    frame = f' stroke="{FRAME}" stroke-width="2"' if framed else ""
    yield f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="5" fill="{colour}"{frame}/>'
    for number, word in enumerate(words):
        yield _text(x + 6, y + 14 + number * LINE, word, 11 if number == 0 else 10)


def _text(x: int, y: int, words: str, size: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{INK}">{escape(words)}</text>'
