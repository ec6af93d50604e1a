"""Timeline of a run's last steps: engines and trainer as two rows of bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mrl.observe.curves import INK, PALETTE, empty_axes
from mrl.observe.metrics import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 6  # steps
WAITING, PHASE = "rollout", "time/"
LATE = {WAITING: 1, "sync": 2, "validation": 3}  # order of phases that follow training if samples are prefetched
ENGINES, TRAINER = 1, 0  # vertical positions of the rows


@dataclass(frozen=True)
class TimelineBar:
    """Bar in seconds from the beginning of the timeline. row: ENGINES or TRAINER"""

    row: int
    what: str
    start: float
    seconds: float


def timeline_bars(rows: Sequence[Row]) -> list[TimelineBar]:
    """Returns the bars of the last steps.

    Prefetched generation begins with the step before its training step. A step that prefetches one step ahead waits for
    its samples at its end.
    """
    steps = [row for row in rows if row["step"] > 0 and PHASE + WAITING in row][-SHOWN:]
    found: list[TimelineBar] = []
    at = before = 0.0
    for number, row in enumerate(steps):
        phases = [name.removeprefix(PHASE) for name in row if name.startswith(PHASE)]
        if "perf/train_s" in row:
            phases.sort(key=lambda phase: LATE.get(phase, 0))
        began = at
        for phase in phases:
            found.append(TimelineBar(TRAINER, phase, at, row[PHASE + phase]))
            at += row[PHASE + phase]
        if "perf/generate_s" not in row:
            found.append(TimelineBar(ENGINES, "generation", began, row[PHASE + WAITING]))
        elif number > 0:
            found.append(TimelineBar(ENGINES, "generation", before, min(row["perf/generate_s"], at - before)))
        before = began
    return found


def draw_timeline(rows: Sequence[Row], size: tuple[float, float] = (11.2, 2.2)) -> Figure | None:
    """Draws the timeline; None if nothing was sampled."""
    found = timeline_bars(rows)
    if not found:
        return None
    figure, axes = empty_axes(size)
    names = list(dict.fromkeys(bar.what for bar in found if bar.row == TRAINER))
    colors = dict(zip(names, PALETTE[1:] * len(names), strict=False)) | {"generation": PALETTE[0]}
    for what, color in colors.items():
        own = [bar for bar in found if bar.what == what]
        label = "waiting for samples" if what == WAITING else what
        axes.barh([b.row for b in own], [b.seconds for b in own], left=[b.start for b in own], color=color, label=label)
    axes.set_yticks([TRAINER, ENGINES], ["trainer", "engines"])
    axes.set_xlabel(f"seconds, last {SHOWN} steps", color=INK, fontsize=8.5)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, ncols=7, loc="upper center", bbox_to_anchor=(0.5, 1.25))
    return figure
