"""A key that is missing in config.json gets the default of transformers, or is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from mrl.families import ModelArch, UnsupportedModel, load_arch
from tests.conftest import TinyModels
from tests.helpers.tiny import FAMILIES
from tests.helpers.tiny_vl import make_tiny_vl

PICTURES = ("qwen2_5_vl", "qwen3_vl")
HEADS = 128  # a multiple of every family's default number of key-value heads
DEPTH = 27  # the vision tower's depth; its default deepstack layers are below it
TABLES = ("text_config", "vision_config")
FAST = ("qwen2", "gemma3_text", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_vl")
NOT_READ = ("eos_token_id",)  # the tokenizer, not config.json, decides where an answer ends


@pytest.fixture(
    params=[name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in (*FAMILIES, *PICTURES)]
)
def config(request: Any, tiny_models: TinyModels, tmp_path: Path) -> dict[str, Any]:
    """Returns config.json of a model with 128 heads of 16 channels each, with which the family's defaults are valid."""
    name = request.param
    made = make_tiny_vl(tmp_path / name, name, weights=False) if name in PICTURES else tiny_models(name, weights=False)
    whole: dict[str, Any] = json.loads((made / "config.json").read_text())
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_size": 16 * HEADS}
    whole.get("text_config", whole).update(heads)
    if name in PICTURES:
        whole["vision_config"].update(depth=DEPTH, out_hidden_size=16 * HEADS)
    return whole


def test_a_missing_key_is_what_transformers_takes_it_to_be(config: dict[str, Any], tmp_path: Path) -> None:
    assert _read(config, tmp_path) == _completed(config, tmp_path)
    wrong = {}
    for key in _without_each(config):
        try:
            own = _read(config, tmp_path)
        except UnsupportedModel:
            continue
        theirs = _completed(config, tmp_path)
        if own != theirs:
            wrong[key] = own, theirs
    assert not wrong


def _without_each(config: dict[str, Any]) -> Iterator[str]:
    """Yields each key, also of nested tables, while `config` lacks it."""
    for table in (config, *(config[name] for name in TABLES if name in config)):
        for key in [key for key in table if key not in NOT_READ]:
            value = table.pop(key)
            yield key
            table[key] = value


def _read(config: dict[str, Any], folder: Path) -> ModelArch:
    (folder / "config.json").write_text(json.dumps(config))
    return load_arch(folder)


def _completed(config: dict[str, Any], folder: Path) -> ModelArch:
    """Returns the model of a config.json after transformers has written its defaults into it."""
    (folder / "config.json").write_text(json.dumps(config))
    found = AutoConfig.from_pretrained(folder)
    text = found.get_text_config()
    if getattr(text, "head_dim", None) is None:  # its attention divides, but config.json does not contain the result
        text.head_dim = text.hidden_size // text.num_attention_heads
    found.to_json_file(folder / "config.json", use_diff=False)
    return load_arch(folder)
