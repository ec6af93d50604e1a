"""A small configuration of `trainer: reward_model`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

NUMBERS = range(1, 13)


def rows_of(form: str) -> list[dict[str, Any]]:
    if form == "pairs":
        return [
            {
                "prompt": f"{n} + {n} =",
                "chosen": f"{2 * n}" * (n % 4 + 1),
                "rejected": f"{n}!",
                "data_source": "ab"[n % 2],
                "margin": n / 10,
            }
            for n in NUMBERS
        ]
    if form == "lists":
        texts = ("right", "near", "nearly", "wrong")
        ranked = [[{"rank": r, "completion": text} for r, text in enumerate(texts[: 2 + n % 3])] for n in NUMBERS]
        return [{"prompt": f"{n}?", "completions": items} for n, items in zip(NUMBERS, ranked, strict=True)]
    if form == "scores":
        return [{"prompt": f"{n}?", "completion": "yes" * (n % 3 + 1), "score": n % 3} for n in NUMBERS]
    steps = [[f"{n}{i}" for i in range(1 + n % 3)] for n in NUMBERS]
    return [
        {"prompt": f"{n}:", "completions": of, "labels": [i < 1 for i in range(len(of))]}
        for n, of in zip(NUMBERS, steps, strict=True)
    ]


def write(folder: Path, model: Path, form: str = "pairs", name: str = "config.yaml", **keys: Any) -> Path:
    """Writes FOLDER/NAME and twelve rows, which are also the held-out rows."""
    data = folder / f"{form}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(form)))
    config = {
        "trainer": "reward_model",
        "run": {"name": "run", "root": str(folder / "runs"), "steps": 4, "trackers": []},
        "model": {"path": str(model), "dtype": "float32"},
        "actor": {"optimizer": {"lr": 1e-3}, "max_tokens_per_microbatch": 60},
        "data": {"train": str(data), "validation": str(data), "max_prompt_tokens": 16, "max_tokens": 32},
        "batch": {"rows_per_step": 6},
        "validation": {"every_steps": 2},
        "checkpoint": {"every_steps": 2, "export_hf": True},
    } | keys
    (folder / name).write_text(yaml.safe_dump(config))
    return folder / name
