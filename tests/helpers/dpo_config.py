"""A small configuration of `trainer: dpo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

CACHE = "reference_sums.safetensors"


def write(folder: Path, model: Path, name: str = "config.yaml", **keys: Any) -> Path:
    """Writes FOLDER/NAME, twelve preference pairs, and the responses of the pairs as labelled rows."""
    pairs = [
        {"prompt": f"{n} + {n} =", "chosen": f"{2 * n}" * (n % 4 + 1), "rejected": f"{n}!", "data_source": "ab"[n % 2]}
        for n in range(1, 13)
    ]
    labels = [
        {"prompt": row["prompt"], "completion": row[half], "label": half == "chosen"}
        for row in pairs
        for half in ("chosen", "rejected")
    ]
    for file, rows in (("pairs", pairs), ("labels", labels)):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "trainer": "dpo",
        "run": {"name": "run", "root": str(folder / "runs"), "steps": 4, "trackers": []},
        "model": {"path": str(model), "dtype": "float32"},
        "actor": {"optimizer": {"lr": 1e-3}, "max_tokens_per_microbatch": 40},
        "data": {"train": str(folder / "pairs.jsonl"), "max_prompt_tokens": 16, "max_tokens": 32},
        "batch": {"rows_per_step": 6},
        "checkpoint": {"every_steps": 2, "export_hf": True},
    } | keys
    (folder / name).write_text(yaml.safe_dump(config))
    return folder / name
