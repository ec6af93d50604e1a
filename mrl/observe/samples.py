"""Samples of a run in readable form, and the same validation prompts before and after training."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mrl.core import Sample
from mrl.observe.files import Unreadable, read_config, read_jsonl, write_jsonl


def save_samples(run_dir: Path, name: str, samples: list[Sample]) -> Path:
    """RUN_DIR/rollouts/NAME.jsonl, a line a sample in the order of the list; returns the file."""
    file = run_dir / "rollouts" / f"{name}.jsonl"
    write_jsonl(file, (sample_row(sample) for sample in samples))
    return file


def sample_row(sample: Sample) -> dict[str, Any]:
    """What a line of the file says of one sample."""
    prompt = sample.request.prompt
    return {
        "sample_id": sample.request.sample_id,
        "index": prompt.index,
        "prompt": prompt.text,
        "response": sample.response_text,
        "score": sample.score,
        "parts": sample.score_parts,
        "tokens": len(sample.response_ids),
        "finish_reason": sample.finish_reason,
        "weight_version": sample.weight_version,
        "row": prompt.row,
        **({"reward_error": sample.reward_error} if sample.reward_error else {}),
    }


_COMPARED = {"index": int, "prompt": str, "response": str, "score": int | float, "row": dict}


@dataclass(frozen=True)
class Comparison:
    """One validation prompt at the first and at the last validation."""

    prompt: str
    answer: str
    before: str
    after: str
    score_before: float
    score_after: float


@dataclass(frozen=True)
class BeforeAfter:
    first_step: int
    last_step: int
    mean_before: float
    mean_after: float
    rows: list[Comparison]


def before_after(run_dir: Path, limit: int = 12) -> BeforeAfter | None:
    """The first `limit` prompts that both the first and the last validation have; None without any validation."""
    files = validation_files(run_dir)
    if not files:
        return None
    (first_step, first), (last_step, last) = files[0], files[-1]
    before, after = _samples(first), _samples(last)
    answer_key = _answer_key(run_dir)
    later = {(row["index"], row["prompt"]): row for row in after}
    pairs = [(row, later[key]) for row in before if (key := (row["index"], row["prompt"])) in later]
    rows = [
        Comparison(a["prompt"], str(a["row"].get(answer_key, "")), a["response"], b["response"], a["score"], b["score"])
        for a, b in pairs[:limit]
    ]
    return BeforeAfter(first_step, last_step, _mean_score(before), _mean_score(after), rows)


def _samples(file: Path) -> list[dict[str, Any]]:
    rows = read_jsonl(file)
    for number, row in enumerate(rows, 1):
        lacking = [name for name, kind in _COMPARED.items() if not isinstance(row.get(name), kind)]
        if lacking:
            raise Unreadable(f"{file}: sample {number} has no {' and no '.join(lacking)} as a run writes it")
    return rows


def _answer_key(run_dir: Path) -> str:
    key: str = read_config(run_dir)[1].get("data", {}).get("answer_key", "answer")
    return key


def validation_files(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, file) of every validation, by step."""
    found = [
        (int(match[1]), file)
        for file in (run_dir / "rollouts").glob("validation_step_*.jsonl")
        if (match := re.fullmatch(r"validation_step_(\d+)", file.stem))
    ]
    return sorted(found)


def before_after_table(run_dir: Path, limit: int = 12, console: Console | None = None) -> None:
    """Prints the same prompts' answers at the first and the last validation."""
    console = console or Console()
    found = before_after(Path(run_dir), limit)
    if found is None:
        console.print(f"{run_dir}: no validation samples yet")
        return
    table = Table(title=f"validation score {found.mean_before:.2f} -> {found.mean_after:.2f}")
    table.add_column("prompt")
    table.add_column("answer", style="dim")
    table.add_column(f"step {found.first_step}")
    table.add_column(f"step {found.last_step}")
    for row in found.rows:
        table.add_row(
            Text(row.prompt),
            Text(row.answer),
            _scored(row.before, row.score_before),
            _scored(row.after, row.score_after),
        )
    console.print(table)


def _scored(response: str, score: float) -> Text:
    return Text(f"{response}  ({score:.2f})", style="green" if score >= 1 else "yellow" if score > 0 else "red")


def _mean_score(rows: list[dict[str, Any]]) -> float:
    return sum(row["score"] for row in rows) / max(1, len(rows))
