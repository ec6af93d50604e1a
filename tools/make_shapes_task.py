"""Writes the configuration of a tiny DiT in diffusers' format, images of four shapes, and their prompts to DIR.

Usage: python tools/make_shapes_task.py DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

SHAPES = ("bar", "column", "disc", "ring")
SIZE, PICTURES = 16, 4096


def picture(label: int, rng: np.random.Generator) -> np.ndarray:
    """Returns an image of the shape, at a random place in a random grey on black. [SIZE, SIZE], uint8"""
    y, x = np.mgrid[:SIZE, :SIZE]
    top, left = rng.integers(5, 11, size=2)
    radius = np.hypot(y - top, x - left)
    inside = (abs(y - top) < 2, abs(x - left) < 2, radius < 4, (radius > 3) & (radius < 5))[label]
    return np.where(inside, rng.integers(80, 180), 12).astype(np.uint8)


def write_pictures(directory: Path) -> None:
    rng = np.random.default_rng(1)
    (directory / "pictures").mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(PICTURES):
        label = i % len(SHAPES)
        Image.fromarray(picture(label, rng)).save(directory / "pictures" / f"{i}.png", compress_level=1)
        lines.append({"prompt": SHAPES[label], "label": label, "image": f"pictures/{i}.png"})
    (directory / "pictures.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = [{"prompt": name, "label": label} for label, name in enumerate(SHAPES)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))


def write_model(directory: Path) -> None:
    """Writes the configuration without weights: the first run starts from random ones."""
    net = {
        "_class_name": "DiTTransformer2DModel",
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "in_channels": 1,
        "out_channels": 1,
        "num_layers": 3,
        "sample_size": SIZE,
        "patch_size": 4,
        "num_embeds_ada_norm": len(SHAPES),
        "norm_num_groups": 1,
    }
    scheduler = {
        "_class_name": "DDIMScheduler",
        "num_train_timesteps": 1000,
        "clip_sample": False,
        "steps_offset": 1,
        "timestep_spacing": "leading",
    }
    for folder, name, config in (("transformer", "config", net), ("scheduler", "scheduler_config", scheduler)):
        (directory / folder).mkdir(parents=True, exist_ok=True)
        (directory / folder / f"{name}.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    target = parser.parse_args().directory
    write_pictures(target)
    write_model(target / "model_init")
