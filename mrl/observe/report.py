"""RUN_DIR/report.html: one self-contained page with a run's curves, sampled answers and configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path
from statistics import median_high
from typing import Any

from mrl.files import write_atomically
from mrl.observe import html, machine
from mrl.observe.curves import Chart, charts_of, draw, is_zero, to_bytes
from mrl.observe.files import adapter_names, numbered_files, read_config
from mrl.observe.method import method_of
from mrl.observe.metrics import Row, read_metrics
from mrl.observe.progress import clock, number
from mrl.observe.samples import BeforeAfter, Responses, before_after

FIRST_CURVE = "reward_curve.png"
SHOWN_IMAGES = 6
BY_PROMPT = "reward_by_prompt/"  # metrics


@dataclass(frozen=True)
class RunContent:
    """Content of the page, as far as the run has produced it."""

    name: str
    rows: list[Row]
    config: dict[str, Any]
    config_text: str
    answers: dict[str, BeforeAfter]  # by adapter; "": the model's
    machine: str  # section of the page, as HTML
    pictures: list[Path]  # grids of generated images, by step

    @property
    def adapters(self) -> list[str]:
        return adapter_names(self.config)

    @property
    def charts(self) -> list[Chart]:
        return charts_of(self.adapters)

    @property
    def total_steps(self) -> int | None:
        """run.steps; None if config.yaml does not have it."""
        steps = self.config.get("run", {}).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def last_step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def learns_from_samples(self) -> bool:
        return any(name.endswith("actor/pg_loss") for row in self.rows for name in row)

    @property
    def updates_once_a_step(self) -> bool:
        """True if all samples of a step go into one update, as far as the configuration tells."""
        batch = self.config.get("batch", {})
        prompts, each = batch.get("prompts_per_step"), batch.get("samples_per_prompt")
        if not isinstance(prompts, int) or not isinstance(each, int):
            return False
        whole = batch.get("samples_per_minibatch") in (None, prompts * each)
        return whole and batch.get("epochs_per_step") == 1 and self.config.get("replay") is None


def write_report(run_dir: str | Path, refresh_s: float | None = None) -> Path:
    """Writes RUN_DIR/report.html and, once there is a first curve, RUN_DIR/reward_curve.png; returns the page.

    refresh_s: seconds after which a browser reloads the page; None: never

    It works during a run and before the first logged step. Raises FileNotFoundError for a missing directory,
    UnreadableFile for a file that is not in the format of a run.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir} is not a run directory")
    run = load_run(run_dir)
    picture = first_curve(run.name, run.rows, run.adapters)
    if picture is not None:
        write_atomically(run_dir / FIRST_CURVE, picture)
    page = run_dir / "report.html"
    write_atomically(page, render(run, refresh_s))
    return page


def first_curve(name: str, rows: list[Row], adapters: Sequence[str] = ()) -> bytes | None:
    """Returns a PNG of the run's main curve: reward, accuracy or loss; None before there is one."""
    for curve in charts_of(adapters)[:3]:
        picture = draw(curve, rows, size=(7.2, 4.0))
        if picture is not None:
            picture.axes[0].set_title(f"{curve.title}: {name}", loc="left", fontsize=12, pad=12)
            return to_bytes(picture, "png")
    return None


def load_run(run_dir: Path) -> RunContent:
    """Reads the run directory's current content. Raises UnreadableFile."""
    text, config = read_config(run_dir)
    rows = read_metrics(run_dir)
    page = machine.section(run_dir, rows)
    return RunContent(run_dir.resolve().name, rows, config, text, before_after(run_dir), page, image_grids(run_dir))


def render(run: RunContent, refresh_s: float | None = None) -> str:
    """Returns the whole page as HTML, pictures included, without parts that the run has not produced yet."""
    answers = "".join(_answers(name, found) for name, found in run.answers.items())
    seen = [_curves(run), _images(run.pictures), _by_prompt(run.rows), answers]
    return html.page(run.name, [_header(run), _tiles(run), *seen, run.machine, _config(run.config_text)], refresh_s)


def _header(run: RunContent) -> str:
    total = run.total_steps
    done = total is not None and run.last_step >= total
    of = f" of {total}" if total is not None else ""
    badge = f'<span class="badge{" done" if done else ""}">step {run.last_step}{of}</span>'
    model = escape(str(run.config.get("model", {}).get("path", "")))
    about = " · ".join(part for part in (escape(method_of(run.config)), model) if part)
    return f'<header><h1>{escape(run.name)}</h1>{badge}<span class="sub">{about}</span></header>'


def _tiles(run: RunContent) -> str:
    rows = run.rows
    tiles: list[tuple[str, str]] = []
    by_adapter = [(f"{each}: ", f"{each}/") for each in run.adapters] or [("", "")]
    of_models = [
        ("training reward", ("reward/mean",), ".3f"),
        ("validation score", ("validation/score", "validation/mean"), ".3f"),
        ("loss", () if run.learns_from_samples else ("actor/loss",), ".4f"),
        ("held-out loss", ("validation/loss",), ".4f"),
        ("held-out perplexity", ("validation/perplexity",), ".3g"),
        ("response tokens", ("response/mean_tokens",), ".1f"),
        ("truncated responses", ("response/truncated",), ".0%"),
        ("explained variance", ("critic/explained_variance",), ".2f"),
    ]
    for (whose, prefix), (label, names, form) in product(by_adapter, of_models):
        values = next((v for name in names if (v := [row[prefix + name] for row in rows if prefix + name in row])), [])
        if values:
            tiles.append((whose + label, f"{number(values[0], form)} → {number(values[-1], form)}"))
    for label, name, form, of in (
        ("largest log-prob mismatch", "mismatch/max_abs", ".1e", max),
        ("tokens / s, median", "perf/tokens_per_s", ",.0f", median_high),
        ("MFU, median", "perf/mfu", ".1%", median_high),
    ):
        if values := [row[name] for row in rows if name in row]:
            tiles.append((label, format(of(values), form)))
    seconds = sum(value for row in rows for name, value in row.items() if name.startswith("time/"))
    if seconds:
        tiles.append(("total time of all phases", clock(seconds)))
    cells = "".join(
        f'<div class="card tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for label, value in tiles
    )
    return f'<div class="tiles">{cells}</div>' if cells else ""


def _curves(run: RunContent) -> str:
    if not run.rows:
        return '<p class="empty">No step has been logged yet.</p>'
    cards = [
        html.card(curve.title, note, html.picture(curve.title, to_bytes(figure, "svg")))
        for curve in run.charts
        if (figure := draw(curve, run.rows))
        for note in [(curve.rl_note if run.learns_from_samples else "") or curve.note]
    ]
    return f'<h2>Curves</h2>{_zeros(run)}<div class="grid">{"".join(cards)}</div>'


def _zeros(run: RunContent) -> str:
    """Lists the lines that stay at 0."""
    found = [line.zero for curve in run.charts for line in curve.lines if is_zero(run.rows, line)]
    if not found:
        return ""
    why = (
        ". Each step makes one on-policy update: the ratio is 1, nothing is clipped, and the loss is minus the mean "
        "advantage"
    )
    because = why if run.updates_once_a_step else ""
    return f'<p class="sub">0 at every step, not drawn: {escape(", ".join(found))}{because}.</p>'


def image_grids(run_dir: Path) -> list[Path]:
    """RUN_DIR/images/step_N.png, sorted by N."""
    return [file for _, file in numbered_files(run_dir / "images", "step_*.png")]


def _images(pictures: list[Path]) -> str:
    """Shows the first grid, the last, and some between them."""
    if not pictures:
        return ""
    last = len(pictures) - 1
    shown = [pictures[i] for i in sorted({round(last * k / (SHOWN_IMAGES - 1)) for k in range(SHOWN_IMAGES)})]
    cards = (
        html.card(file.stem.replace("_", " "), "", html.picture(file.stem, file.read_bytes(), "png")) for file in shown
    )
    return f'<h2>Images</h2><div class="grid">{"".join(cards)}</div>'


def _by_prompt(rows: list[Row]) -> str:
    """Table of the first and the last mean reward of each prompt of an image run."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(BY_PROMPT))
    if not names:
        return ""
    table = []
    for name in names:
        values = [row[name] for row in rows if name in row]
        table.append([name.removeprefix(BY_PROMPT), number(values[0], ".3f"), number(values[-1], ".3f")])
    shown = html.table(["prompt", "first", "last"], table)
    return f'<h2>Reward by prompt</h2><div class="card wide">{shown}</div>'


def _answers(adapter: str, found: BeforeAfter) -> str:
    head = f"<tr><th>prompt</th><th>answer</th><th>step {found.first_step}</th><th>step {found.last_step}</th></tr>"
    body = "".join(
        f'<tr><td class="text">{"".join(html.picture(file.stem, file.read_bytes(), "png") for file in r.pictures)}'
        f'{escape(r.prompt)}</td><td class="text">{escape(r.answer)}</td>'
        f"{_response(r.before, r.score_before, r.turns_before)}{_response(r.after, r.score_after, r.turns_after)}</tr>"
        for r in found.rows
    )
    mean = f"mean score {found.means}"
    return (
        f"<h2>{escape(adapter and f'{adapter}: ')}Validation prompts before and after training</h2>"
        f'<p class="sub">{mean}</p>'
        f'<div class="card wide"><table class="answers">{head}{body}</table></div>'
    )


def _response(text: str, score: float | None, turns: tuple[Responses, ...] = ()) -> str:
    """Table cell of a response; an agent's is shown by turns, with the environment's text in another colour."""
    kind = "" if score is None or score <= 0 else "full" if score >= 1 else "some"
    number_shown = "no score" if score is None else f"{score:.2f}"
    shown = escape(text)
    if turns:
        classes = {True: "turn", False: "turn told"}
        shown = "".join(f'<span class="{classes[is_model]}">{escape(words)}</span>' for is_model, words in turns)
    return f'<td class="text"><span class="score {kind}">{number_shown}</span>{shown}</td>'


def _config(text: str) -> str:
    if not text:
        return ""
    return (
        '<h2>Configuration</h2><div class="card"><details><summary>config.yaml with all keys</summary>'
        f"<pre>{escape(text)}</pre></details></div>"
    )
