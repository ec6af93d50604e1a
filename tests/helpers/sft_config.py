"""A small configuration of `trainer: sft`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml


def write(folder: Path, model: Path, name: str = "config.yaml", **keys: Any) -> Path:
    """Writes FOLDER/NAME, twelve rows of sums to learn, and eight held-out rows of two kinds."""
    rows = [{"prompt": f"{n} + {n} =", "answer": f"{2 * n}" * (n % 3 + 1)} for n in range(1, 13)]
    held_out = [
        {"prompt": f"{n} * {n} =", "answer": f"{n * n}" * (n % 4 + 1), "data_source": "ab"[n % 2]} for n in range(1, 9)
    ]
    for file, content in (("train", rows), ("held_out", held_out)):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    config: dict[str, Any] = {
        "trainer": "sft",
        "run": {"name": "run", "root": str(folder / "runs"), "steps": 50, "trackers": []},
        "model": {"path": str(model), "dtype": "float32"},
        "actor": {"optimizer": {"lr": 3e-3}, "max_tokens_per_microbatch": 60},
        "data": {
            "train": str(folder / "train.jsonl"),
            "validation": str(folder / "held_out.jsonl"),
            "max_prompt_tokens": 16,
        },
        "batch": {"samples_per_step": 6},
        "validation": {"every_steps": 1, "patience": 2, "min_delta": 0.01, "keep_best": True},
        "checkpoint": {"every_steps": 2, "keep_last": 1, "export_hf": True},
        "resilience": {"straggler_every_steps": 1000},  # this file records how fast the ranks were
    }
    for key, section in keys.items():
        config[key] = {**config.get(key, {}), **section}
    (folder / name).write_text(yaml.safe_dump(config))
    return folder / name
