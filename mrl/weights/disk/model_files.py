"""Files of a model besides its weights: configuration, tokenizer, chat template, generation defaults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from mrl.config.model_dirs import TRACKER
from mrl.config.tokenizer_files import SETTINGS, SPECIAL, special_tokens
from mrl.families import (
    FAMILIES,
    GENERATES_SUFFIXES,
    SCORES,
    STEP_HEAD_SUFFIX,
    VALUE_HEAD_SUFFIX,
    ModelArch,
    architecture_of,
    body_of,
    read_hf_config,
)
from mrl.families.table import Role
from mrl.foreign import TEMPLATES, read_json

CHAT_TEMPLATE = "chat_template.jinja"  # takes precedence over tokenizer_config.json
GENERATION = "generation_config.json"
_KEPT_PATTERNS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", TEMPLATES)


def copy_model_files(
    source: Path, target: Path, dtype: torch.dtype, arch: ModelArch, role: Role, *, drafts: bool = False
) -> None:
    """Copies all files of a model directory except its weights. config.json gets the weights' dtype and no
    quantization. drafts: the weights include multi-token prediction layers; otherwise config.json counts none.

    A critic becomes transformers' sequence classifier with one label a head, or a token classifier: a score head and no
    lm_head. Its padding token is one that ends no text: transformers takes the score of the last token that is not
    padding. With EOS as padding, that would be the token before the end.
    """
    config = read_hf_config(source)  # raises for links that leave the directory
    for pattern in _KEPT_PATTERNS:
        for found in source.glob(pattern):
            _copy(found, target / found.name)
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    for part in (
        config,
        *(config[name] for name in ("text_config", "vision_config") if isinstance(config.get(name), dict)),
    ):
        part[key] = str(dtype).removeprefix("torch.")
    if not drafts:
        config |= {key: 0 for key in FAMILIES[arch.family].draft_keys if key in config}
    config.pop("quantization_config", None)  # the written weights are not quantized
    if role == "critic":
        config |= _classifier(config, arch)
        _pad(target, config)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_prompt_files(
    directory: Path, base: Path, template: str | Path | None, ends: Collection[int], eos_token: str | None
) -> None:
    """Writes the files beside trained weights, or adapters, that differ from the base model's.

    Args:
        template: the run's chat template; None: the base's.
        base, ends, eos_token: as in `name_ends`.
    """
    if template is not None:
        shutil.copyfile(template, directory / CHAT_TEMPLATE)
    name_ends(directory, base, ends, eos_token)
    if eos_token is not None and (directory / "config.json").is_file() and role_of(directory) == "critic":
        config = read_hf_config(directory)
        _pad(directory, config)  # the new EOS token may have been the padding token
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def name_ends(directory: Path, base: Path, ends: Collection[int], eos_token: str | None) -> None:
    """Writes the end tokens that a model has learnt beside its weights, or its adapters.

    Args:
        base: base model, whose own end tokens stay.
        ends: ids to add to generation_config.json's eos_token_id.
        eos_token: EOS token for the tokenizer's settings, if they are in `directory`; None: unchanged.
    """
    if eos_token is not None:
        _name_token(directory, "eos_token", eos_token)
    try:
        said = read_json(base / GENERATION)
    except FileNotFoundError:
        config = read_hf_config(base)
        said = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    own = said.get("eos_token_id")
    known = [] if own is None else own if isinstance(own, list) else [own]
    if new := sorted({*ends} - {*known}):
        said["eos_token_id"] = [*known, *new]
        (directory / GENERATION).write_text(json.dumps(said, indent=2) + "\n")


def role_of(source: Path) -> Role:
    """Returns the role of the model according to config.json."""
    return "policy" if architecture_of(read_hf_config(source)).endswith(GENERATES_SUFFIXES) else "critic"


def _classifier(config: dict[str, Any], arch: ModelArch) -> dict[str, Any]:
    base = FAMILIES[arch.family].scorer or body_of(architecture_of(config))
    names = ["value"] if arch.score_heads == 1 else [f"value_{i}" for i in range(arch.score_heads)]
    return {
        "architectures": [base + (STEP_HEAD_SUFFIX if arch.scores_steps else VALUE_HEAD_SUFFIX)],
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": SCORES,
    } | ({"classifier_dropout": 0.0} if arch.scores_steps else {})


def _pad(directory: Path, config: dict[str, Any]) -> None:
    """Sets the padding token in config.json and in the tokenizer's settings, which must agree. Without a suitable
    token, takes the first id that ends no text.
    """
    try:
        tokens = special_tokens(directory)
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        tokens = {}  # no tokenizer that mrl reads
    named = config.get("eos_token_id")
    ends = {*(named if isinstance(named, list) else [named]), *[tokens[role][1] for role in ("eos",) if role in tokens]}
    own = config.get("pad_token_id")
    if "pad" not in tokens and isinstance(own, int) and own not in ends:
        return
    for role in ("pad", "unk", "bos"):
        if role in tokens and tokens[role][1] not in ends:
            config["pad_token_id"] = tokens[role][1]
            if role != "pad":
                _name_token(directory, "pad_token", tokens[role][0])
            return
    config["pad_token_id"] = next(number for number in range(len(ends) + 1) if number not in ends)


def _name_token(directory: Path, key: str, token: str) -> None:
    for name in (SETTINGS, SPECIAL):
        file = directory / name
        if file.is_file():
            content = read_json(file)
            content[key] = token
            file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _copy(found: Path, to: Path) -> None:
    if found.is_dir():
        shutil.copytree(found, to, dirs_exist_ok=True)
    elif not found.name.endswith(".index.json") and found.name != TRACKER:
        shutil.copyfile(found, to)
