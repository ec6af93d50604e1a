"""What belongs to a model beside its weights: configuration, tokenizer, chat template, generation defaults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from mrl.config.model_dirs import TRACKER
from mrl.families import VALUE_HEAD_SUFFIX, architecture_of, read_hf_config
from mrl.families.table import Role
from mrl.foreign import TEMPLATES

_KEPT_PATTERNS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", TEMPLATES)


def copy_model_files(source: Path, target: Path, dtype: torch.dtype, role: Role) -> None:
    """Everything of a model directory but its weights; config.json says the weights' dtype.

    A critic becomes what transformers calls a sequence classifier with one label: a score head and no lm_head.
    """
    config = read_hf_config(source)  # which refuses links out of the directory
    for pattern in _KEPT_PATTERNS:
        for found in source.glob(pattern):
            _copy(found, target / found.name)
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    if role == "critic":
        config |= _classifier(config)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def role_of(source: Path) -> Role:
    """What config.json says that the model is."""
    return "policy" if architecture_of(read_hf_config(source)).endswith("ForCausalLM") else "critic"


def _classifier(config: dict[str, Any]) -> dict[str, Any]:
    base = architecture_of(config).removesuffix("ForCausalLM").removesuffix(VALUE_HEAD_SUFFIX)
    return {"architectures": [base + VALUE_HEAD_SUFFIX], "id2label": {"0": "value"}, "label2id": {"value": 0}}


def _copy(found: Path, to: Path) -> None:
    if found.is_dir():
        shutil.copytree(found, to, dirs_exist_ok=True)
    elif not found.name.endswith(".index.json") and found.name != TRACKER:
        shutil.copyfile(found, to)
