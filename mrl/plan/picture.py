"""Who is where, as an SVG: a row a node, a square a GPU, coloured by pipeline stage, engines framed."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from mrl.plan.plan import Plan
from mrl.plan.text import engine_of
from mrl.plan.workload import Model

CELL, GAP, MARGIN, LABEL, LINE = 74, 6, 16, 64, 12
STAGES = ("#cfe3f7", "#d9efd0", "#fbe3c0", "#f2cfd6", "#ddd3ee", "#cdebe7", "#efe6b8", "#e3d6cb")
FRAME, INK = "#b5482a", "#222222"


def draw(plan: Plan) -> str:
    """A complete SVG document; a block for each layout of the run's models."""
    blocks: list[tuple[str, Model]] = []
    for model in plan.work.models.values():
        if all(model.layout != other.layout for _, other in blocks):
            names = [other.name for other in plan.work.models.values() if other.layout == model.layout]
            blocks.append((", ".join(names), model))
    cluster, height = plan.cluster, MARGIN
    body: list[str] = []
    for title, model in blocks:
        body.append(_text(MARGIN, height + 14, f"{title}: colours are pipeline stages, frames are engines", 13))
        top = height + 24
        for rank in range(cluster.gpus):
            body += _cell(plan, model, rank, top)
        height = top + cluster.nodes * (CELL + GAP) + MARGIN
    width = 2 * MARGIN + LABEL + min(cluster.per_node, cluster.gpus) * (CELL + GAP)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>", ""])


def _cell(plan: Plan, model: Model, rank: int, top: int) -> Iterator[str]:
    node, place = divmod(rank, plan.cluster.per_node)
    x, y = MARGIN + LABEL + place * (CELL + GAP), top + node * (CELL + GAP)
    if place == 0:
        yield _text(MARGIN, y + CELL // 2, f"node {node}", 12)
    seat, engine = model.grid.seat(rank), engine_of(plan, rank)
    frame = f' stroke="{FRAME}" stroke-width="2"' if engine is not None else ""
    colour = STAGES[seat.pp % len(STAGES)]
    yield f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="5" fill="{colour}"{frame}/>'
    words = [f"rank {rank}", f"tp {seat.tp}  pp {seat.pp}", f"dp {seat.dp}  cp {seat.cp}"]
    words += [f"ep {seat.ep}"] if model.layout.expert > 1 else []
    words += [f"engine {engine}"] if engine is not None else []
    for number, word in enumerate(words):
        yield _text(x + 6, y + 14 + number * LINE, word, 11 if number == 0 else 10)


def _text(x: int, y: int, words: str, size: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{INK}">{escape(words)}</text>'
