"""Tiny diffusion models as diffusers directories of a few kB, and helpers for their tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CLASSES, SIZE = 3, 8
DDIM: dict[str, Any] = {"clip_sample": False, "steps_offset": 1, "num_train_timesteps": 1000}


def tiny_directory(path: Path, net: str = "dit", scheduler: str = "ddim", **settings: Any) -> Path:
    """Writes a diffusers directory with random weights from seed 0."""
    import diffusers
    import torch

    torch.manual_seed(0)
    if net == "dit":
        model = diffusers.DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=1,
            out_channels=1,
            num_layers=1,
            sample_size=SIZE,
            patch_size=4,
            num_embeds_ada_norm=CLASSES,
            norm_num_groups=1,
            dropout=0.3,
        )
        model.proj_out_2.weight.data.normal_(0, 0.02)
        model.save_pretrained(path / "transformer")
    else:
        model = diffusers.UNet2DModel(
            sample_size=SIZE,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=4,
            attention_head_dim=8,
            num_class_embeds=CLASSES + 1,
        )
        model.save_pretrained(path / "unet")
    kind, given = diffusers.DDIMScheduler, DDIM
    if scheduler == "flow":
        kind, given = diffusers.FlowMatchEulerDiscreteScheduler, {"shift": 3.0}
    kind(**given | settings).save_pretrained(path / "scheduler")
    return path


def prompts_file(path: Path, rows: int = 6) -> Path:
    words = ("low", "mid", "high")
    lines = [{"prompt": words[i % CLASSES], "label": i % CLASSES} for i in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def with_ranks(processes: int, script: str, *arguments: str | Path, timeout_s: float = 240) -> str:
    """Runs tests/worlds/SCRIPT on `processes` gloo ranks with one thread each, and returns what the ranks print."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.worlds.forked", str(processes), str(ROOT / "tests/worlds" / script)]
        + [str(argument) for argument in arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
