"""A small configuration of `trainer: ddpo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.helpers.diffusion_tools import prompts_file, tiny_directory


def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "trainer": "ddpo",
        "run": {"name": "run", "root": str(tmp_path / "runs"), "steps": 4, "trackers": []},
        "model": {"path": str(tiny_directory(tmp_path / "model", set_alpha_to_one=False))},
        "actor": {"optimizer": {"lr": 1e-3, "warmup_steps": 2}},
        "data": {"train": str(prompts_file(tmp_path / "prompts.jsonl"))},
        "sampler": {"steps": 4, "guidance": 2.0, "batch": 3},
        "batch": {"prompts_per_step": 3, "images_per_prompt": 2, "images_per_update": 3, "timestep_fraction": 0.5},
        "advantage": {"against": "prompt", "buffer_size": 4, "min_count": 2},
        "reward": {"function": "brightness"},
        "images": {"every_steps": 1, "count": 6},
        "checkpoint": {"every_steps": 1, "export_hf": True},
    }


def written(tmp_path: Path, config: dict[str, Any], name: str = "config.yaml") -> Path:
    (tmp_path / name).write_text(yaml.safe_dump(config))
    return tmp_path / name
