"""A tiny model learns by reward alone what only its image shows: small letters for a dark image, else large ones."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.helpers import zygote
from tests.helpers.tiny_vl import make_tiny_vl

pytestmark = [pytest.mark.slow, pytest.mark.longest]

REWARD = """
def score(prompt, response, row):
    return sum(c.islower() if row["answer"] == "small" else c.isupper() for c in response if c.isascii()) / 4
"""
PICTURES, STEPS = 48, 30
CRITIC = {"optimizer": {"lr": 3e-3, "warmup_steps": 2}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"adv_estimator": "grpo"}, "batch": {"prompts_per_step": 8, "samples_per_prompt": 8}},
    "gae": {"algorithm": {"adv_estimator": "gae"}, "batch": {"prompts_per_step": 64}, "critic": CRITIC},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng, rows = tmp_path_factory.mktemp("vision_learning"), np.random.default_rng(0), []
    make_tiny_vl(root / "model", "qwen3_vl", layers=2, depth=2)
    for i in range(PICTURES):
        pixels = rng.integers(0, 80, (8, 16, 3)) + (0 if i % 2 else 175)
        Image.fromarray(pixels.astype("uint8")).save(root / f"{i}.png")
        rows.append({"prompt": "<image>", "images": [f"{i}.png"], "answer": "small" if i % 2 else "large"})
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "reward.py").write_text(REWARD)
    return root


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_only_the_picture_says_is_learnt(folder: Path, name: str) -> None:
    config = {
        "trainer": "rl",
        "run": {"name": name, "root": str(folder / "runs"), "steps": STEPS, "trackers": []},
        "model": {"path": str(folder / "model"), "dtype": "float32", "vision": {"train": True}},
        "actor": {"optimizer": {"lr": 3e-3, "warmup_steps": 2}},
        "data": {"train": str(folder / "rows.jsonl"), "chat_template": True, "max_prompt_tokens": 40},
        "rollout": {"engine": "transformers", "sampling": {"max_new_tokens": 4}},
        "reward": {"function": f"{folder / 'reward.py'}:score"},
        **ALGORITHMS[name],
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    done = zygote.run("mrl", "train", folder / f"{name}.yaml", timeout_s=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    first, last = (scores(folder / "runs" / name, steps) for steps in (range(1, 3), range(STEPS - 4, STEPS + 1)))
    assert max(first.values()) < 0.3 and min(last.values()) > 0.6, (first, last)


def scores(run: Path, steps: range) -> dict[str, float]:
    """Returns the mean scores by the answer that the image asks for. The same response to all images would score at
    most 1 for one answer and 0 for the other."""
    files = [run / f"rollouts/step_{step}.jsonl" for step in steps]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {kind: fmean(row["score"] for row in rows if row["row"]["answer"] == kind) for kind in ("small", "large")}
