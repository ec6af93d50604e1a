"""Curves of a run, drawn with matplotlib from the rows of metrics.jsonl; None if there is nothing to show."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from mrl.observe.metrics import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ["#3b6ea8", "#d1783a", "#4c9a6a", "#9a5fa8", "#b8496b", "#7b8794", "#c2a83e", "#3fa3ad"]
INK, FAINT = "#2b3440", "#e4e8ee"
SMOOTH_FROM = 15  # points; shorter curves are drawn as they are
LOG_FROM = 10.0  # ratio of largest to smallest value; a logarithmic axis below it shows hardly any tick
ROUND_OFF = 1e-6
ROOM_ABOVE = 1.05  # a line does not run along the upper edge


@dataclass(frozen=True)
class Series:
    metrics: tuple[str, ...]  # the first one that the run has
    label: str
    markers: bool = False  # few points, never smoothed
    zero: str = ""  # text that replaces a line that is 0 at every step, up to round-off


@dataclass(frozen=True)
class Chart:
    title: str
    lines: tuple[Series, ...]
    note: str = ""
    rl_note: str = ""  # replaces `note` in a run that learns from samples
    log: bool = False  # logarithmic axis, for values that span powers of ten
    floor: float | None = None  # the axis shows at least from here ...
    ceiling: float | None = None  # ... to here


CHARTS = [
    Chart(
        "Reward",
        (
            Series(("reward/mean",), "training samples"),
            Series(("validation/score", "validation/mean"), "validation", markers=True),
        ),
        floor=0.0,
        ceiling=1.0,
    ),
    Chart(
        "Preference accuracy",
        (Series(("rewards/accuracies",), "pairs"),),
        "share of pairs whose chosen response has the higher reward",
        floor=0.0,
        ceiling=1.0,
    ),
    Chart(
        "Loss",
        (
            Series(("actor/loss",), "actor", zero="loss of the policy"),
            Series(("validation/loss",), "held-out rows", markers=True),
        ),
        "the minimized loss; for sft, the cross-entropy of the responses",
        "policy loss: only its gradient matters, its value need not fall",
    ),
    Chart(
        "Held-out tokens",
        (Series(("validation/token_accuracy",), "top-1", markers=True),),
        "share of held-out target tokens that the model ranks first",
        floor=0.0,
        ceiling=1.0,
    ),
    Chart("Reward margin", (Series(("rewards/margins",), "chosen minus rejected"),)),
    Chart(
        "KL divergence",
        (
            Series(("actor/ppo_kl",), "to the rollout policy", zero="KL divergence to the rollout policy"),
            Series(("kl/ref",), "to the reference"),
        ),
        "nats per token",
    ),
    Chart(
        "Clip fraction",
        (
            Series(("actor/clipfrac",), "actor", zero="clip fraction of the actor"),
            Series(("critic/clipfrac",), "critic", zero="clip fraction of the critic"),
        ),
        "share of tokens whose loss is clipped",
        floor=0.0,
    ),
    Chart("Value explained variance", (Series(("critic/explained_variance",), "critic"),), "1: a perfect critic"),
    Chart("Entropy", (Series(("actor/entropy",), "actor"),), "nats per token", floor=0.0),
    Chart(
        "Response length",
        (Series(("response/mean_tokens",), "mean"),),
        "tokens per response, including the end token",
        floor=0.0,
    ),
    Chart(
        "Train / rollout log-prob mismatch",
        (Series(("mismatch/max_abs",), "largest"), Series(("mismatch/mean_abs",), "mean")),
        "absolute difference per token between trainer and engine",
        log=True,
    ),
    Chart(
        "Log-prob error of the loss head in fp8",
        (Series(("actor/head_error_max",), "largest"), Series(("actor/head_error_mean",), "mean")),
        "absolute difference per token to a head in model.dtype, on some of the samples",
        log=True,
    ),
    Chart(
        "Gradient norm",
        (Series(("actor/grad_norm",), "actor"), Series(("critic/grad_norm",), "critic")),
        "before clipping",
        log=True,
        floor=0.0,
    ),
]
MACHINE_CHARTS = [
    Chart(
        "Throughput",
        (Series(("perf/tokens_per_s",), "tokens / s"),),
        "tokens per second over the whole step",
        floor=0.0,
    ),
    Chart("MFU", (Series(("perf/mfu",), "models"),), "share of the GPUs' bfloat16 peak while models run", floor=0.0),
    Chart(
        "TFLOP/s per rank",
        (Series(("perf/tflop_per_s_per_rank",), "models"),),
        "while models run; without recomputation and engines",
        floor=0.0,
    ),
    Chart(
        "Engine throughput",
        (Series(("engines/tokens_per_s_fastest",), "fastest"), Series(("engines/tokens_per_s_slowest",), "slowest")),
        "response tokens per second of an engine with requests",
        floor=0.0,
    ),
    Chart(
        "Overlap of generation and training",
        (
            Series(("perf/train_s",), "training"),
            Series(("perf/generate_s",), "generation"),
            Series(("perf/wait_s",), "waiting for samples", zero="seconds of waiting for samples"),
        ),
        "seconds per step; of prefetched generation, only the waiting adds to a step",
        floor=0.0,
    ),
    Chart(
        "Staleness of samples",
        (Series(("staleness/max",), "max"), Series(("staleness/mean",), "mean")),
        "weight versions behind, over tokens",
        floor=0.0,
    ),
]


def charts_of(adapters: Sequence[str]) -> list[Chart]:
    """Returns CHARTS; if the run trains several adapters, with the lines of each."""
    return [replace(curve, lines=_lines_of(adapters, curve.lines)) for curve in CHARTS] if adapters else CHARTS


def _lines_of(adapters: Sequence[str], lines: tuple[Series, ...]) -> tuple[Series, ...]:
    return tuple(
        replace(
            line,
            metrics=tuple(f"{name}/{metric}" for metric in line.metrics),
            label=f"{name}: {line.label}",
            zero=line.zero and f"{name}: {line.zero}",
        )
        for name in adapters
        for line in lines
    )


def draw(curve: Chart, rows: list[Row], size: tuple[float, float] = (5.4, 2.9)) -> Figure | None:
    """Draws one set of axes; None without a line to draw. Noisy lines are faint, with their moving mean on top."""
    found: list[tuple[Series, np.ndarray, np.ndarray]] = []
    for line in curve.lines:
        x, y = series(rows, line)
        hidden = any(np.array_equal(x, other) and np.array_equal(y, values) for _, other, values in found)
        if len(x) and not hidden and not is_zero(rows, line):
            found.append((line, x, y))
    if not found:
        return None
    figure, axes = empty_axes(size)
    for color, (line, x, y) in zip(cycle(PALETTE), found, strict=False):
        _plot(axes, line, x, y, color)
    positive = np.concatenate([y[y > 0] for _, _, y in found])
    if curve.log and len(positive) and positive.max() > LOG_FROM * positive.min():
        axes.set_yscale("log", nonpositive="mask")
        axes.tick_params(which="minor", left=False, labelleft=False)
    else:
        _limits(axes, curve)
    first, last = rows[0]["step"], rows[-1]["step"]
    margin = max(0.5, 0.03 * (last - first))
    axes.set_xlim(first - margin, last + margin)  # equal for all curves of a run
    if len(found) > 1:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    return figure


def is_zero(rows: list[Row], line: Series) -> bool:
    """True if the line exists, stays at 0 up to round-off, and has words for that."""
    _, y = series(rows, line)
    return bool(line.zero) and len(y) > 0 and bool(np.abs(y).max() < ROUND_OFF)


def draw_phases(rows: list[Row], size: tuple[float, float] = (5.4, 2.9)) -> Figure | None:
    """Draws the seconds of each phase, stacked; a phase that a step does not have counts as 0."""
    steps = [row for row in rows if any(name.startswith("time/") for name in row) and row["step"] > 0]
    names = list(dict.fromkeys(name for row in steps for name in row if name.startswith("time/")))
    if not steps:
        return None
    figure, axes = empty_axes(size)
    x = np.array([row["step"] for row in steps])
    heights = np.array([[row.get(name, 0.0) for row in steps] for name in names])
    colors = [PALETTE[i % len(PALETTE)] for i in range(len(names))]
    base = np.zeros(len(x))
    edges = np.append(x, x[-1] + 1)  # a step's time fills [step, step + 1)
    for name, color, height in zip(names, colors, heights, strict=True):
        axes.stairs(
            base + height, edges, baseline=base, fill=True, color=color, alpha=0.85, label=name.removeprefix("time/")
        )
        base = base + height
    planned = [row.get("plan/step_s", np.nan) for row in steps]
    if not np.isnan(planned).all():
        label = "plan, for the phases that it covers"
        axes.stairs(planned, edges, baseline=None, color=INK, linewidth=1.2, linestyle="--", label=label)
    axes.set_ylabel("seconds", color=INK, fontsize=8.5)
    axes.set_ylim(0, max(1e-9, float(np.percentile(base, 98)) * 1.25))
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    return figure


def to_bytes(figure: Figure, kind: str) -> bytes:
    """Returns the picture as "svg" or "png"."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=150, bbox_inches="tight", facecolor="white")
    return buffer.getvalue()


def series(rows: list[Row], line: Series) -> tuple[np.ndarray, np.ndarray]:
    """Returns (steps, values), both float64 [n], of the first of the line's metrics that the run has."""
    name = next((m for m in line.metrics if any(m in row for row in rows)), None)
    points = [(row["step"], row[name]) for row in rows if name is not None and name in row]
    table = np.array(points, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _plot(axes: Axes, line: Series, x: np.ndarray, y: np.ndarray, color: str) -> None:
    if line.markers or len(x) < SMOOTH_FROM:
        axes.plot(x, y, color=color, linewidth=1.8, marker="o", markersize=3.5, label=line.label)
        return
    axes.plot(x, y, color=color, linewidth=0.8, alpha=0.3)
    axes.plot(x, moving_mean(y, max(3, len(y) // 25)), color=color, linewidth=1.9, label=line.label)


def moving_mean(y: np.ndarray, half: int) -> np.ndarray:
    """Centred mean [n] over up to 2 * half + 1 points of y [n], fewer at both ends."""
    total = np.concatenate([[0.0], np.cumsum(y)])
    index = np.arange(len(y))
    low, high = (index - half).clip(0), (index + half + 1).clip(max=len(y))
    return (total[high] - total[low]) / (high - low)


def empty_axes(size: tuple[float, float]) -> tuple[Figure, Axes]:
    """Returns empty axes over steps in the style of a run's pictures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=size)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8c0cc")
    axes.tick_params(colors="#5b6675", labelsize=8.5, length=3)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("step", color=INK, fontsize=8.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    return figure, axes


def _limits(axes: Axes, curve: Chart) -> None:
    low, high = axes.get_ylim()
    if curve.ceiling is not None:
        high = max(high, curve.ceiling * 1.03)
    if curve.floor is not None:
        low = curve.floor if low >= curve.floor - 0.1 * (high - low) else low
    axes.set_ylim(low, max(high, low + ROOM_ABOVE * (axes.dataLim.ymax - low)))
