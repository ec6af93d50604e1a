"""Rows with images for runs of tiny models: image files, images inside the row, and rows without images."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

REWARD = "def score(prompt, response, row):\n    return len(set(response)) / 8 + len(row['images'])\n"


def write_rows(root: Path, inline: tuple[int, ...] = ()) -> list[bytes]:
    """Writes ROOT/rows.jsonl with six rows of one, no and two images in turn, their image files, and a reward.py.
    Returns the encoded images. inline: numbers of the rows that contain their images"""
    rng, rows, stored = np.random.default_rng(0), [], []
    for i in range(6):
        images: list[str] = []
        for k in range((1, 0, 2)[i % 3]):
            mode = ("RGBA", "L")[k] if i == 2 else "RGB"
            buffer = io.BytesIO()
            _noise(rng, mode).save(buffer, "PNG")
            stored.append(buffer.getvalue())
            if i in inline:
                images.append("data:image/png;base64," + base64.b64encode(stored[-1]).decode())
            else:
                images.append(f"{i}_{k}.png")
                (root / images[-1]).write_bytes(stored[-1])
        rows.append({"prompt": "<image>" * len(images) + "what?", "images": images, "answer": "3"})
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "reward.py").write_text(REWARD)
    return stored


def _noise(rng: np.random.Generator, mode: str) -> Image.Image:
    pixels = rng.integers(0, 256, (*rng.integers(5, 40, 2), len(mode))).astype("uint8").squeeze()
    return Image.fromarray(pixels)


def vision_settings(folder: Path, model: Path, name: str, layout: dict[str, int], **more: Any) -> dict[str, Any]:
    """Returns the settings of a run on `write_rows(folder)`. Every step uses all rows, so the same images occur before
    and after each sync of the vision tower's weights."""
    return {
        "trainer": "rl",
        "run": {"name": name, "root": str(folder / "runs"), "steps": 2, "nproc": 2},
        "model": {"path": str(model), "dtype": "float32", "vision": {"train": True}},
        "actor": {"parallel": layout, "optimizer": {"lr": 0.005}, "max_tokens_per_microbatch": 150},
        "data": {"train": str(folder / "rows.jsonl"), "chat_template": True, "max_prompt_tokens": 200},
        "batch": {"prompts_per_step": 6, "samples_per_prompt": 2},
        "rollout": {"engine": "transformers", "sampling": {"max_new_tokens": 8}},
        "sync": {"verify": "checksum"},
        "reward": {"function": f"{folder / 'reward.py'}:score"},
        "algorithm": {"adv_estimator": "grpo"},
        **more,
    }
