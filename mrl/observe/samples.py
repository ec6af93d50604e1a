"""Readable samples of a run, and the same validation prompts before and after training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mrl.core import Sample
from mrl.files import write_atomically
from mrl.observe.files import UnreadableFile, adapter_names, numbered_files, read_config, read_jsonl, write_jsonl

SHOWN = 12  # prompts compared side by side
PICTURES = "rollouts/pictures"


def save_samples(run_dir: Path, name: str, rows: Iterable[dict[str, Any]]) -> Path:
    """Writes RUN_DIR/rollouts/NAME.jsonl, one line for each `sample_row` in order; returns the file."""
    file = run_dir / "rollouts" / f"{name}.jsonl"
    write_jsonl(file, rows)
    return file


def save_pictures(run_dir: Path, samples: Sequence[Sample]) -> None:
    """Saves, once, the pictures of the validation prompts that the run's page shows."""
    for prompt in {sample.request.prompt.index: sample.request.prompt for sample in samples[:SHOWN]}.values():
        for number, png in enumerate(prompt.pictures):
            if not (picture := run_dir / PICTURES / f"{prompt.index}_{number}.png").exists():
                picture.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(picture, png)


def sample_row(sample: Sample) -> dict[str, Any]:
    """Returns one line of the file; a sample that is left out has neither an id in the step nor a score."""
    prompt = sample.request.prompt
    return {
        "sample_id": None if sample.left_out else sample.request.sample_id,
        "index": prompt.index,
        "prompt": prompt.text,
        "response": sample.response_text,
        "score": None if sample.left_out else sample.score,
        "parts": sample.score_parts,
        "tokens": sample.num_generated_tokens,
        "finish_reason": sample.finish_reason,
        "weight_version": sample.weight_version,
        **({"messages": sample.messages} if sample.messages else {}),
        "row": prompt.row,
        **({"reward_error": sample.reward_error} if sample.reward_error else {}),
        **({"left_out": sample.left_out} if sample.left_out else {}),
    }


Responses = tuple[bool, str]  # (is from the model, text)
_COMPARED = {"index": int, "prompt": str, "response": str, "score": int | float | None, "row": dict}


@dataclass(frozen=True)
class Comparison:
    """One prompt at the first and the last validation. score_...: None if a response has no score. pictures: PNG
    files"""

    prompt: str
    answer: str
    before: str
    after: str
    score_before: float | None
    score_after: float | None
    turns_before: tuple[Responses, ...] = ()  # turns of an agent and its environment; empty for a single response
    turns_after: tuple[Responses, ...] = ()
    pictures: tuple[Path, ...] = ()


@dataclass(frozen=True)
class BeforeAfter:
    """The first and the last validation.

    mean_...: over the `compared` responses with a score at both validations, None if there are none; `asked` is the
    number of responses of the larger validation
    """

    first_step: int
    last_step: int
    mean_before: float | None
    mean_after: float | None
    compared: int
    asked: int
    rows: list[Comparison]

    @property
    def means(self) -> str:
        """Text such as "0.250 → 1.000", with the number of responses if some are missing."""
        if self.mean_before is None or self.mean_after is None:
            return f"unknown: none of {self.asked} responses has a score at both steps"
        some = f" ({self.compared} of {self.asked} responses have a score at both steps)"
        some = some if self.compared < self.asked else ""
        return f"{self.mean_before:.3f} → {self.mean_after:.3f}{some}"


def before_after(run_dir: Path, limit: int = SHOWN) -> dict[str, BeforeAfter]:
    """Compares the first `limit` prompts that the first and the last validation share. Returns the comparison of each
    of the run's adapters by name, or of the model under ""; empty without any validation.
    """
    config = read_config(run_dir)[1]
    if not (names := adapter_names(config)):
        found = {"": _before_after(run_dir, limit, config.get("data", {}))}
    else:
        keys = {name: (config["adapters"][name] or {}).get("data") or config.get("data", {}) for name in names}
        found = {name: _before_after(run_dir / "adapters" / name, limit, keys[name]) for name in names}
    return {name: compared for name, compared in found.items() if compared is not None}


def _before_after(folder: Path, limit: int, keys: dict[str, Any]) -> BeforeAfter | None:
    """keys: section `data`"""
    files = numbered_files(folder / "rollouts", "validation_step_*.jsonl")
    if not files:
        return None
    (first_step, first), (last_step, last) = files[0], files[-1]
    before, after = _samples(first), _samples(last)
    earlier, later = _by_prompt(before), _by_prompt(after)
    pairs = [(row, later[key]) for key, row in earlier.items() if key in later]
    scored = [(a["score"], b["score"]) for a, b in pairs if None not in (a["score"], b["score"])]
    mean_before, mean_after = (sum(one) / len(scored) for one in zip(*scored)) if scored else (None, None)
    rows = [
        Comparison(
            *(_question(a, keys), str(a["row"].get(keys.get("answer_key", "answer"), ""))),
            *(a["response"], b["response"], a["score"], b["score"]),
            *(_turns(a), _turns(b)),
            pictures=tuple(file for _, file in numbered_files(folder / PICTURES, f"{a['index']}_*.png")),
        )
        for a, b in [(earlier[key], later[key]) for key in earlier if key in later and not key[2]][:limit]
    ]
    asked = max(len(before), len(after))
    return BeforeAfter(first_step, last_step, mean_before, mean_after, len(scored), asked, rows)


def _by_prompt(rows: list[dict[str, Any]]) -> dict[tuple[int, str, int], dict[str, Any]]:
    """Maps (index, prompt, number of the response to it) to its row."""
    found: dict[tuple[int, str, int], dict[str, Any]] = {}
    seen: Counter[tuple[int, str]] = Counter()
    for row in rows:
        key = row["index"], row["prompt"]
        found[*key, seen[key]] = row
        seen[key] += 1
    return found


def _turns(row: dict[str, Any]) -> tuple[Responses, ...]:
    """Turns of a sample. Raises UnreadableFile for malformed messages."""
    messages = row.get("messages", [])
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise UnreadableFile("the messages of a sample are not a list of messages")
    return tuple((each.get("role") == "assistant", str(each.get("content", ""))) for each in messages)


def _samples(file: Path) -> list[dict[str, Any]]:
    rows = read_jsonl(file)
    for number, row in enumerate(rows, 1):
        lacking = [name for name, kind in _COMPARED.items() if not isinstance(row.get(name), kind)]
        if lacking:
            raise UnreadableFile(f"{file}: sample {number} has no valid {' and no valid '.join(lacking)}")
    return rows


def _question(sample: dict[str, Any], keys: dict[str, Any]) -> str:
    """Returns the user's question without the chat template: the row's text or last message, else the whole prompt."""
    asked = sample["row"].get(keys.get("prompt_key", "prompt"))
    if isinstance(asked, list) and asked and isinstance(asked[-1], dict):
        asked = asked[-1].get("content")
    return asked if isinstance(asked, str) and asked.strip() and asked.strip() in sample["prompt"] else sample["prompt"]


def before_after_table(run_dir: Path, limit: int = 12, console: Console | None = None) -> None:
    """Prints the answers to the same prompts at the first and the last validation."""
    console = console or Console()
    compared = before_after(Path(run_dir), limit)
    if not compared:
        console.print(f"{run_dir}: no validation samples")
    for name, found in compared.items():
        table = Table(title=f"{name and f'{name}: '}validation score {found.means}")
        table.add_column("prompt")
        table.add_column("answer", style="dim")
        table.add_column(f"step {found.first_step}")
        table.add_column(f"step {found.last_step}")
        for row in found.rows:
            before, after = _scored(row.before, row.score_before), _scored(row.after, row.score_after)
            table.add_row(Text(row.prompt), Text(row.answer), before, after)
        console.print(table)


def _scored(response: str, score: float | None) -> Text:
    if score is None:
        return Text(f"{response}  (no score)", style="dim")
    return Text(f"{response}  ({score:.2f})", style="green" if score >= 1 else "yellow" if score > 0 else "red")
