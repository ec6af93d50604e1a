"""Progress display: a live panel in a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mrl.core import StepStats

RECENT_STEPS = 20  # averaged for the ETA
PLAIN_TICK_S = 30.0  # between lines of a long phase in a log file

THREE_DIGITS = ".3g"  # format; large numbers show all digits before the point

# (label, metrics whose first present one is shown, format)
HEADLINES: list[tuple[str, tuple[str, ...], str]] = [
    ("reward", ("reward/mean",), ".3f"),
    ("validation", ("validation/score", "validation/mean"), ".3f"),
    ("loss", ("actor/loss", "actor/pg_loss"), ".4f"),
    ("held-out loss", ("validation/loss",), ".4f"),
    ("perplexity", ("validation/perplexity",), ".3g"),
    ("accuracy", ("rewards/accuracies",), ".3f"),
    ("margin", ("rewards/margins",), ".3f"),
    ("kl", ("kl/ref", "actor/ppo_kl"), ".2e"),
    ("clipped", ("actor/clipfrac",), ".1%"),
    ("grad norm", ("actor/grad_norm",), ".3g"),
    ("entropy", ("actor/entropy",), ".3f"),
    ("explained variance", ("critic/explained_variance",), ".2f"),
    ("response tokens", ("response/mean_tokens",), ".1f"),
    ("truncated", ("response/truncated",), ".0%"),
    ("mismatch max", ("mismatch/max_abs",), ".1e"),
    ("tokens/s", ("perf/tokens_per_s",), ",.0f"),
    ("tokens/s/rank", ("perf/tokens_per_s_per_rank",), ",.0f"),
    ("TFLOP/step", ("perf/model_tflop",), THREE_DIGITS),
    ("TFLOP/s/rank", ("perf/tflop_per_s_per_rank",), THREE_DIGITS),
    ("MFU", ("perf/mfu",), ".1%"),
]


def headlines(metrics: dict[str, float]) -> list[tuple[str, str]]:
    """Returns (label, value as text) of the headline metrics that are present.

    The policy-gradient loss is left out: it is about 0 by construction and says nothing about progress.
    """
    shown = []
    for label, names, form in HEADLINES:
        name = next((n for n in names if n in metrics), None)
        if name is not None and not (label == "loss" and "actor/pg_loss" in metrics):
            text = number(metrics[name], form)
            scored, asked = metrics.get("validation/scored"), metrics.get("validation/of")
            if label == "validation" and scored != asked:
                text += f" ({scored:.0f} of {asked:.0f} scored)"
            shown.append((label, text))
    return shown


def number(value: float, form: str) -> str:
    """Formats a number, without a sign if it rounds to 0."""
    text = format(value, ",.0f" if form == THREE_DIGITS and value >= 100 else form)
    return text.lstrip("-") if not text.strip("-+0.e%") else text


def shares(stats: StepStats, digits: int) -> str:
    """Returns text such as "rollout 3.0s (75%)  update 1.0s (25%)".

    With a plan in the metrics, it is "rollout 3.0s (75%, plan 2.1s)", followed by the sum of the planned phases.
    """
    total = sum(stats.seconds.values()) or 1.0
    plan = {name[5:-2]: value for name, value in stats.metrics.items() if name.startswith("plan/")}
    parts = []
    for phase, s in stats.seconds.items():
        beside = f", plan {plan[phase]:.{digits}f}s" if phase in plan else ""
        parts.append(f"{phase} {s:.{digits}f}s ({s / total:.0%}{beside})")
    if "step" in plan:
        both = sum(s for phase, s in stats.seconds.items() if phase in plan)
        parts.append(f"planned phases {both:.{digits}f}s (plan {plan['step']:.{digits}f}s)")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """Formats seconds as "1h05m", "5m07s" or "7s"."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


class Progress:
    """Position of the run. The recorder changes it, a display draws it."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.latest = StepStats(0)
        self.metrics: dict[str, float] = {}
        self.phase = "starting"
        self.phase_began = time.monotonic()
        self.finished, self.expected = 0, 0
        self._ends: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS + 1)

    def enter(self, phase: str) -> None:
        self.phase, self.phase_began = phase, time.monotonic()
        self.finished = self.expected = 0

    def step_done(self, stats: StepStats) -> None:
        self.latest = stats
        self.metrics |= stats.metrics
        self._ends.append((stats.step, time.monotonic()))

    def eta_s(self) -> float | None:
        """Seconds to the last step, by the mean of recent steps; None before two steps have ended."""
        if len(self._ends) < 2:
            return None
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        return max(0, self.total_steps - last) * (ended - began) / max(1, last - first)


class Display(Protocol):
    """Draws a `Progress`."""

    def step_done(self) -> None: ...

    def tick(self) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainDisplay:
    """Prints one line a step and, in long phases, a line every half minute from its own thread."""

    def __init__(self, progress: Progress, console: Console | None = None) -> None:
        self._progress = progress
        self._console = console or Console(soft_wrap=True, highlight=False, markup=False)
        self._last_sign = time.monotonic()
        self._lock, self._closed = threading.RLock(), threading.Event()
        threading.Thread(target=self._tick_until_closed, name="progress", daemon=True).start()

    def _tick_until_closed(self) -> None:
        while not self._closed.wait(PLAIN_TICK_S / 6):
            self.tick()

    def step_done(self) -> None:
        p = self._progress
        parts = [f"step {p.latest.step}/{p.total_steps}"]
        parts += [f"{label} {value}" for label, value in headlines(p.latest.metrics)]
        if p.latest.seconds:
            parts.append(shares(p.latest, 1))
        eta = p.eta_s()
        if eta is not None:
            parts.append(f"eta {clock(eta)}")
        self.note(" | ".join(parts))

    def tick(self) -> None:
        p = self._progress
        with self._lock:
            if p.expected and time.monotonic() - self._last_sign >= PLAIN_TICK_S:
                self.note(f"{p.phase}: {p.finished}/{p.expected} after {clock(time.monotonic() - p.phase_began)}")

    def close(self) -> None:
        self._closed.set()

    def note(self, text: str) -> None:
        with self._lock:
            self._console.print(text)
            self._console.file.flush()
            self._last_sign = time.monotonic()


class LiveDisplay:
    """Panel that redraws itself four times a second."""

    def __init__(self, progress: Progress, console: Console | None = None) -> None:
        self._progress = progress
        self._live = Live(console=console or Console(), get_renderable=self.render, refresh_per_second=4)
        self._live.start()

    def step_done(self) -> None:
        self._live.refresh()

    def tick(self) -> None:
        """Does nothing: the panel redraws itself."""

    def note(self, text: str) -> None:
        self._live.console.print(Text(text, style="dim"))

    def close(self) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        """Returns the current panel; rich calls it four times a second."""
        p = self._progress
        body: list[RenderableType] = [self._bars(), Text(), self._metrics()]
        if p.latest.seconds:
            body += [Text(), Text(shares(p.latest, 2), style="cyan")]
        return Panel(Group(*body), title=f"step {p.latest.step} of {p.total_steps}", border_style="blue", expand=False)

    def _bars(self) -> Table:
        p = self._progress
        eta = p.eta_s()
        grid = Table.grid(padding=(0, 2))
        grid.add_row("run", ProgressBar(p.total_steps, p.latest.step, 40), "" if eta is None else f"{clock(eta)} left")
        bar = ProgressBar(p.expected or None, p.finished, 40, pulse=not p.expected)
        took = clock(time.monotonic() - p.phase_began)
        grid.add_row(Text(p.phase, style="bold"), bar, f"{p.finished}/{p.expected}  {took}" if p.expected else took)
        return grid

    def _metrics(self) -> Table:
        grid = Table.grid(padding=(0, 3))
        pairs = headlines(self._progress.metrics)
        for i in range(0, len(pairs), 2):
            cells = [Text.assemble((f"{label:>18} ", "dim"), (value, "bold")) for label, value in pairs[i : i + 2]]
            grid.add_row(*cells)
        return grid
