"""Models and rows whose loss is not finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.helpers.tiny import make_tiny, tiny_tokenizer
from tests.helpers.train_tools import write_config

LETTER = "Z"  # id in the tiny tokenizer; the poisoned model's output is NaN wherever this token is in a prompt


def poisoned(model: Path, token: int) -> Path:
    """Writes a model whose output is NaN at `token`, though all its weights are finite, as loading requires.

    The first channel is zero except at `token`, where the first norm makes it infinite. No other weight reads or writes
    this channel, so training does not change it.
    """
    file = model / "model.safetensors"
    weights = load_file(file)
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "layernorm.weight", "model.norm.weight")):
            tensor[0] = 0.0
        elif name.endswith(("embed_tokens.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensor[:, 0] = 0.0
    embedding = weights["model.embed_tokens.weight"]
    embedding[token] = torch.eye(1, embedding.shape[1])[0]
    weights["model.layers.0.input_layernorm.weight"][0] = 3e38
    save_file(weights, file, metadata={"format": "pt"})
    return model


def letter_model(folder: Path) -> Path:
    (token,) = tiny_tokenizer()(LETTER, add_special_tokens=False)["input_ids"]
    return poisoned(make_tiny(folder / "model", "llama"), token)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "nonfinite.jsonl").read_text().splitlines()]


def sft_config(folder: Path, model: Path) -> Path:
    file = write_config(folder, model)
    config = yaml.safe_load(file.read_text())
    for section in ("rollout", "sync", "reward", "algorithm"):
        del config[section]
    file.write_text(yaml.safe_dump(config | {"trainer": "sft", "batch": {"samples_per_step": 4}}))
    return file
