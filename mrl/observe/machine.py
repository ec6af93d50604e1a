"""Hardware section of a run's page: time by phase, engines, weight sync, memory, placement of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from mrl.observe import html
from mrl.observe.curves import MACHINE_CHARTS, draw, draw_phases, to_bytes
from mrl.observe.files import ENGINES, PLAN, RANKS, UnreadableFile, read_jsonl
from mrl.observe.metrics import Row
from mrl.observe.timeline import draw_timeline

GIB = 1 << 30
MOST_ENGINES = 16  # shown at most
HOPS = {  # parts of a weight sync: metric and label
    "gather": "gather of shards on the sending ranks",
    "network": "from the sending ranks to other nodes",
    "engine": "from one rank of each node to its engines",
}


def section(run_dir: Path, rows: list[Row]) -> str:
    """Returns a section of the page as HTML, empty before the first step, without parts that the run directory lacks.
    Raises UnreadableFile."""
    plan, steps = read_plan(run_dir), [row for row in rows if "perf/tokens_per_s" in row]
    if not steps:
        return ""
    cards = [_phases(steps), *_curves(rows), _engines(run_dir, steps), _weight_sync(steps), _memory(steps, plan)]
    grid = "".join(card for card in cards if card)
    return f'<h2>Hardware</h2>{_words(plan)}<div class="grid">{grid}</div>{_ranks(run_dir, plan)}'


def read_plan(run_dir: Path) -> dict[str, Any]:
    """Returns RUN_DIR/plan.json; empty for a run without one. Raises UnreadableFile."""
    file = run_dir / PLAN
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise UnreadableFile(f"{file}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UnreadableFile(f"{file}: expected a JSON object")
    return found


def _words(plan: dict[str, Any]) -> str:
    if "why" in plan:
        text = f"No MFU and no predicted step times: {plan['why']}."
    elif "gpu" in plan:
        text = (
            f"Plan for {plan.get('gpus')} x {plan['gpu']}: data-sheet peaks times assumed efficiencies "
            "(docs/planning.md), for the sample lengths of each step."
        )
    else:
        return ""
    return f'<p class="sub">{escape(text)}</p>'


def _phases(steps: list[Row]) -> str:
    names = [name for name in dict.fromkeys(name for row in steps for name in row) if name.startswith("time/")]
    total = sum(row.get(name, 0.0) for row in steps for name in names) or 1.0
    table = []
    for name in names:
        phase = name.removeprefix("time/")
        mine = [row for row in steps if name in row]
        seconds, plan = _middle(mine, name), _middle(mine, f"plan/{phase}_s")
        share = sum(row[name] for row in mine) / total
        table.append([phase, f"{len(mine)}", _seconds(seconds), f"{share:.0%}", _seconds(plan), _ratio(seconds, plan)])
    planned = [name for name in names if any(f"plan/{name.removeprefix('time/')}_s" in row for row in steps)]
    if planned:
        both = [{"both": sum(row.get(name, 0.0) for name in planned), **row} for row in steps if "plan/step_s" in row]
        table.append(_beside("all planned phases", both, "both", "plan/step_s"))
        table.append(_beside("of which offloading", steps, "memory/offload_s", "plan/offload_s"))
    table = [row for row in table if row[2] or row[4]]
    head = ["phase", "steps", "seconds", "share", "plan", "measured / plan"]
    note = "median seconds over the steps with this phase; share of the time of all steps"
    return html.card("Time by phase", note, html.table(head, table)) if table else ""


def _beside(words: str, rows: list[Row], name: str, planned: str) -> list[str]:
    seconds, plan = _middle(rows, name), _middle(rows, planned)
    return [words, "", _seconds(seconds), "", _seconds(plan), _ratio(seconds, plan)]


def _curves(rows: list[Row]) -> list[str]:
    figures = [
        ("Step time", "seconds per step, by phase", draw_phases(rows)),
        ("Timeline", "trainer and engines; prefetched generation starts one step early", draw_timeline(rows)),
    ]
    figures += [(curve.title, curve.note, draw(curve, rows)) for curve in MACHINE_CHARTS]
    return [
        html.card(title, note, html.picture(title, to_bytes(figure, "svg")))
        for title, note, figure in figures
        if figure is not None
    ]


def _engines(run_dir: Path, steps: list[Row]) -> str:
    rows = read_jsonl(run_dir / ENGINES)
    if not rows:
        return ""
    try:
        table = _engine_rows(rows[-1]["engines"])
        waiting = _middle(steps, "engines/waiting")
        how_many = "an unknown number of" if waiting is None else f"{waiting:.1f}"
        waited = f"{how_many} requests waited at rank 0 on average (median over steps)"
        slowest = f"; the slowest {MOST_ENGINES} of {len(table)}" if len(table) > MOST_ENGINES else ""
        note = f"in step {rows[-1]['step']}, while the engine had requests; {waited}{slowest}"
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UnreadableFile(f"{run_dir / ENGINES}: the last line is not in the format that a run writes") from None
    head = ["engine", "requests", "tokens", "mean in flight", "max in flight", "tokens / s"]
    return html.card("Engines", note, html.table(head, table[:MOST_ENGINES]))


def _engine_rows(loads: dict[str, dict[str, Any]]) -> list[list[str]]:
    """One row an engine in the engines' order; with more engines than are shown, the slowest first."""
    speeds = {url: load["tokens"] / load["seconds"] for url, load in loads.items() if load["seconds"]}
    urls = sorted(loads, key=lambda url: speeds.get(url, 0.0)) if len(loads) > MOST_ENGINES else list(loads)
    forms = {"requests": ",", "tokens": ",", "mean": ".1f", "most": ""}
    rows = [(url, [f"{loads[url][name]:{form}}" for name, form in forms.items()]) for url in urls]
    return [[url, *row, f"{speeds[url]:,.0f}" if url in speeds else "-"] for url, row in rows]


def _weight_sync(steps: list[Row]) -> str:
    if not any("perf/sync_s" in row for row in steps):
        return ""
    table = []
    for hop, words in HOPS.items():
        seconds, nbytes = _middle(steps, f"perf/sync_{hop}_s"), _middle(steps, f"sync/{hop}_bytes")
        if seconds is not None:
            table.append([words, _seconds(seconds), _size(nbytes), _rate(nbytes, seconds)])
    seconds, nbytes = _middle(steps, "perf/sync_s"), _middle(steps, "sync/bytes")
    table.append(["whole sync", _seconds(seconds), _size(nbytes), _rate(nbytes, seconds)])
    note = "medians; hops overlap; seconds of the slowest rank, bytes of all receivers"
    return html.card("Weight sync", note, html.table(["hop", "seconds", "sent", "rate"], table))


def _memory(steps: list[Row], plan: dict[str, Any]) -> str:
    kinds = {
        "peak_gib": "peak GPU memory of rank 0's tensors, measured and planned; last column: planned total of the rank "
        "that needs most, with everything on its GPU",
        "resident_gib": "peak host memory of rank 0's process",
    }
    kind = next((kind for kind in kinds if any(f"memory/{kind}/" in name for row in steps for name in row)), None)
    if kind is None:
        return ""
    prefix = f"memory/{kind}/"
    ordered = [steps[-1], *steps]  # the first step also has the phases before it
    phases = [name.removeprefix(prefix) for row in ordered for name in row if name.startswith(prefix)]
    models = any(phase.endswith("_update") for phase in phases)
    table = []
    for phase in dict.fromkeys(phases):
        if phase == "update" and models:  # the phase begins before the first model's part
            continue
        planned = "actor_update" if phase == "update" else phase
        peak = max(row[prefix + phase] for row in steps if prefix + phase in row)
        tensors = plan.get("tensors_of_rank_0", {}).get(planned) if kind == "peak_gib" else None
        worst = plan.get("memory", {}).get(planned, {}) if kind == "peak_gib" else {}
        most = f"{worst['bytes'] / GIB:.1f} of {plan['gpu_bytes'] / GIB:.0f} (rank {worst['rank']})" if worst else ""
        table.append([phase, f"{peak:.2f}", f"{tensors / GIB:.2f}" if tensors is not None else "", most])
    head = ["phase", "GiB", "plan", "plan, whole GPU"]
    return html.card("Memory by phase", kinds[kind], html.table(head, table))


def _ranks(run_dir: Path, plan: dict[str, Any]) -> str:
    file = run_dir / RANKS
    if not file.is_file():
        return ""
    image = html.picture("Placement", file.read_bytes())
    return f'<h2>Placement of ranks and engines</h2><div class="card whole">{image}</div>'


def _middle(rows: Sequence[Row], name: str) -> float | None:
    """Median over the steps after the first if there are any; None without values."""
    values = [row[name] for row in rows if name in row]
    return median(values[1:] or values) if values else None


def _seconds(s: float | None) -> str:
    if s is None:
        return ""
    return f"{s:.1f}" if s >= 10 else f"{s:.2f}" if s >= 1 else f"{s:.3f}"


def _ratio(measured: float | None, plan: float | None) -> str:
    return f"{measured / plan:.2f}" if measured and plan else ""


def _size(nbytes: float | None) -> str:
    """Formats bytes, for example as "1.5 GiB"."""
    if nbytes is None:
        return ""
    unit, size = next(((u, s) for u, s in (("GiB", GIB), ("MiB", 1 << 20)) if nbytes >= s), ("KiB", 1 << 10))
    return f"{nbytes / size:,.1f} {unit}"


def _rate(nbytes: float | None, seconds: float | None) -> str:
    return f"{_size(nbytes / seconds)}/s" if nbytes is not None and seconds else ""
