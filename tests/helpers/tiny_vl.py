"""Tiny random vision-language models, with a tokenizer that has their control tokens and an image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.helpers.tiny import BOS, EOS, PAD, _randomise_vectors, tiny_tokenizer

VL_FAMILIES = ("qwen2_5_vl", "qwen3_vl")
CONTROL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, IMAGE, VIDEO = range(259, 263)  # after the tokenizer's bytes
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}assistant:"
)


def make_tiny_vl(
    directory: Path,
    family: str,
    *,
    tied: bool = False,
    seed: int = 0,
    weights: bool = True,
    layers: int = 4,
    hidden: int = 64,
    patch: int = 4,
    depth: int = 3,
    ffn: int = 96,
    flat: bool = False,
) -> Path:
    """Writes config.json, tokenizer, processor and (unless `weights` is false) safetensors; returns `directory`.

    flat: config.json has the decoder's keys at the top level, as in the published Qwen2.5-VL
    """
    config = AutoConfig.for_model(family, **_settings(family, tied, layers, hidden, patch, depth, ffn))
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    config.architectures = [type(model).__name__]
    if weights:
        _randomise_vectors(model)
        model.save_pretrained(directory)
    else:
        config.save_pretrained(directory)
    if flat:
        _flatten(directory / "config.json")
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(CONTROL)})
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(_processor(family, patch), indent=1))
    return directory


def _settings(family: str, tied: bool, layers: int, hidden: int, patch: int, depth: int, ffn: int) -> dict[str, Any]:
    half = hidden // 8
    section = [half - 2 * (half // 3), half // 3, half // 3]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}
    text = {
        "vocab_size": 320,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
    }
    vision: dict[str, Any] = {
        "depth": depth,
        "hidden_size": 48,
        "num_heads": 4,
        "intermediate_size": ffn,
        "out_hidden_size": hidden,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.1,
    }
    if family == "qwen2_5_vl":
        vision |= {"window_size": 4 * patch, "fullatt_block_indexes": [depth - 1]}
    else:
        text["head_dim"] = hidden // 4
        rope["mrope_interleaved"] = True
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return {
        "text_config": text | {"rope_parameters": rope},
        "vision_config": vision,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "tie_word_embeddings": tied,
    }


def _processor(family: str, patch: int) -> dict[str, Any]:
    size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": 64 * (2 * patch) ** 2}
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor" if family == "qwen2_5_vl" else "Qwen3VLProcessor",
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": size,
        "min_pixels": size["shortest_edge"],
        "max_pixels": size["longest_edge"],
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


def _flatten(file: Path) -> None:
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config |= {name: value for name, value in text.items() if name != "model_type"}
    config["rope_theta"], config["rope_scaling"] = rope.pop("rope_theta"), {**rope, "type": "mrope"}
    config["rope_scaling"].pop("rope_type")
    file.write_text(json.dumps(config))
