"""What both sides of `sft_vs_trl.py` learn from: the model of `preference_workload`, prompts with one answer each."""

from __future__ import annotations

import json
from pathlib import Path

import preference_workload as workload

ROWS_A_PACK = 6
PACK_TOKENS = ROWS_A_PACK * (workload.PROMPT_TOKENS + workload.EVEN_TOKENS)  # even rows fill TRL's packs exactly
ROWS_PER_STEP = 48
PADDED_ROWS = 8  # that TRL pads to one length
LENGTHS = ("even", "uneven")


def make(directory: Path, steps: int, seed: int = 1) -> int:
    """Writes directory/model and the rows of `file`, each of which is seen once; returns the number of the model's
    parameters."""
    parameters = workload.make(directory, 1, seed)
    for kind in LENGTHS:
        pairs = workload.pairs(kind, steps * ROWS_PER_STEP, seed)
        lines = (json.dumps({"prompt": pair["prompt"], "completion": pair["chosen"]}) for pair in pairs)
        file(directory, kind).write_text("\n".join(lines) + "\n")
    return parameters


def file(directory: Path, kind: str) -> Path:
    return directory / f"sft_{kind}.jsonl"


def tokens_by_step(directory: Path, kind: str) -> list[int]:
    """Of all rows with their ends, step by step."""
    found = [json.loads(line) for line in file(directory, kind).read_text().splitlines()]
    each = [len(row["prompt"]) + len(row["completion"]) + 1 for row in found]
    return [sum(each[i : i + ROWS_PER_STEP]) for i in range(0, len(each), ROWS_PER_STEP)]
