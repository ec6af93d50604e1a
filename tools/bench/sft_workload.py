"""Workload of both sides of `sft_vs_trl.py`: the model of `preference_workload`, prompts with one answer each."""

from __future__ import annotations

import json
from pathlib import Path

import preference_workload as workload

ROWS_PER_PACK = 6
PACK_TOKENS = ROWS_PER_PACK * (workload.PROMPT_TOKENS + workload.EVEN_TOKENS)  # even rows fill TRL's packs exactly
ROWS_PER_STEP = 48
PADDED_ROWS = 8  # rows in TRL's padded micro-batch
LENGTHS = ("even", "uneven")


def make(directory: Path, steps: int, seed: int = 1) -> int:
    """Writes directory/model and the rows, each for one use; returns the number of the model's parameters."""
    parameters = workload.make(directory, 1, seed)
    for kind in LENGTHS:
        pairs = workload.pairs(kind, steps * ROWS_PER_STEP, seed)
        lines = (json.dumps({"prompt": pair["prompt"], "completion": pair["chosen"]}) for pair in pairs)
        file(directory, kind).write_text("\n".join(lines) + "\n")
    return parameters


def file(directory: Path, kind: str) -> Path:
    return directory / f"sft_{kind}.jsonl"


def tokens_by_step(directory: Path, kind: str) -> list[int]:
    """Returns the tokens of each step's rows, EOS included."""
    rows = [json.loads(line) for line in file(directory, kind).read_text().splitlines()]
    lengths = [len(row["prompt"]) + len(row["completion"]) + 1 for row in rows]
    return [sum(lengths[i : i + ROWS_PER_STEP]) for i in range(0, len(lengths), ROWS_PER_STEP)]
