"""Vision-language models without a run: config.json, positions, weights."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.core import Rollout
from mrl.data.image_positions import image_positions
from mrl.data.packing import pack
from mrl.families import FAMILIES, UnsupportedModel, load_arch
from mrl.families.flops import ForwardFlops, num_parameters
from mrl.families.table import weight_table
from tests.helpers.tiny_vl import END, IMAGE, START, VL_FAMILIES, make_tiny_vl


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vl")
    return {family: make_tiny_vl(root / family, family) for family in VL_FAMILIES}


@pytest.mark.parametrize("family", VL_FAMILIES)
def test_positions_are_those_of_transformers(models: dict[str, Path], family: str) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(models[family]))
    arch, rng = load_arch(models[family]), np.random.default_rng(0)
    prompts, grids = zip(*(_random_prompt(rng) for _ in range(200)), strict=True)
    rollout = Rollout.of(
        0, prompts, [[7]] * 200, rows=torch.arange(200), image_counts=torch.tensor([len(g) for g in grids]),
        images=torch.tensor([[*g, 0] for each in grids for g in each]).reshape(-1, 3),
    )  # fmt: skip
    assert arch.vision is not None
    found = image_positions(rollout, arch.vision).position_ids.split(rollout.seq_lens.tolist(), 1)
    for ids, own, got in zip(prompts, grids, found, strict=True):
        tokens = torch.tensor([[*ids, 7]])
        grid = torch.tensor([[1, *each] for each in own]) if own else None
        want, _ = model.model.get_rope_index(tokens, image_grid_thw=grid, mm_token_type_ids=(tokens == IMAGE).int())
        assert torch.equal(got, want[:, 0]), ids


def _random_prompt(rng: np.random.Generator) -> tuple[list[int], list[list[int]]]:
    ids, grids = rng.integers(3, 259, rng.integers(1, 5)).tolist(), []
    for _ in range(rng.integers(0, 4)):
        grids.append([2 * int(rng.integers(1, 6)), 2 * int(rng.integers(1, 6))])
        ids += [START, *[IMAGE] * (grids[-1][0] * grids[-1][1] // 4), END, *rng.integers(3, 259, rng.integers(0, 4))]
    return [int(i) for i in ids], grids


def test_a_picture_is_seen_once_in_a_micro_batch_however_many_samples_have_it(models: dict[str, Path]) -> None:
    vision = load_arch(models["qwen3_vl"]).vision
    prompt = [5, START, IMAGE, IMAGE, END]
    images = torch.tensor([[2, 4, 6], [2, 4, 6], [4, 2, 5]])
    rollout = Rollout.of(
        0, [prompt] * 3, [[9, 9]] * 3, rows=torch.tensor([4, 4, 1]), image_counts=torch.ones(3, dtype=torch.int64),
        images=images,
    )  # fmt: skip
    batch = pack(rollout, [0, 1, 2], 1, 0, 1, vision)
    assert batch.images.tolist() == [[1, 0, 4, 2, 5], [4, 0, 2, 4, 6]]
    assert batch.image_positions.tolist() == [2, 3, 9, 10, 16, 17]
    assert batch.image_feature_indices.tolist() == [2, 3, 2, 3, 0, 1]


def test_image_tokens_that_are_no_picture_s_are_refused(models: dict[str, Path]) -> None:
    vision = load_arch(models["qwen3_vl"]).vision
    rollout = Rollout.of(0, [[5], [5, IMAGE]], [[9], [9]])
    with pytest.raises(ValueError, match="sample 1: 1 image tokens in the prompt, 0 for its images"):
        pack(rollout, [0, 1], 1, 0, 1, vision)


def test_the_hub_s_flat_config_is_read_like_the_nested_one(models: dict[str, Path], tmp_path: Path) -> None:
    flat = make_tiny_vl(tmp_path / "flat", "qwen2_5_vl", weights=False, flat=True)
    assert load_arch(flat) == load_arch(models["qwen2_5_vl"])


@pytest.mark.parametrize("family", VL_FAMILIES)
def test_the_tower_s_rows_are_what_the_checkpoint_has(models: dict[str, Path], family: str) -> None:
    from safetensors import safe_open

    rows = weight_table(load_arch(models[family])).values()
    shapes = {name: shape for row in rows for name, shape in zip(row.hf, row.shapes, strict=True)}
    with safe_open(models[family] / "model.safetensors", "pt") as file:
        assert shapes == {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert FAMILIES[family].in_memory(next(iter(shapes))) == "model.visual.patch_embed.proj.weight"


def test_the_tower_counts_as_weights_and_not_as_work_of_a_text_token(models: dict[str, Path]) -> None:
    arch = load_arch(models["qwen3_vl"])
    text = replace(arch, vision=None)
    assert ForwardFlops.of(arch) == ForwardFlops.of(text)
    assert arch.vision is not None
    tower = sum(prod(row.shapes[0]) for row in FAMILIES["qwen3_vl"].tower_rows(arch.vision).values())
    assert num_parameters(arch) == num_parameters(text) + tower


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, "Qwen2VLForConditionalGeneration is not supported"),
        ({"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, "is not supported"),
        ({"vision_config": None}, "lacks 'vision_config'"),
        ({"image_token_id": 320}, "image_token_id must be token ids from 0 to 319"),
        ({"image_token_id": None}, "image_token_id"),
        ({"audio_config": {}}, "qwen3_vl: audio_config"),
        ({"vision_config.out_hidden_size": 32}, "out_hidden_size=32 must equal the decoder's hidden_size, 64"),
        ({"vision_config.in_channels": 4}, "4 channels per pixel"),
        ({"vision_config.deepstack_visual_indexes": [1, 0]}, "ascending"),
        ({"vision_config.deepstack_visual_indexes": [3]}, "layers from 0 to 2"),
        ({"text_config.rope_parameters.mrope_section": [4, 2]}, "sum 8"),
        ({"text_config.rope_parameters.rope_type": "yarn"}, "yarn"),
        ({"text_config.rope_parameters.mrope_interleaved": False}, "mrope_interleaved must be true, not False"),
        ({"text_config.rope_parameters.mrope_interleaved": None}, "lacks 'mrope_interleaved': expected true"),
        ({"text_config.attention_dropout": 0.1}, "attention_dropout=0.1"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    models: dict[str, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = json.loads((models["qwen3_vl"] / "config.json").read_text())
    for path, value in change.items():
        *above, key = path.split(".")
        where = config
        for part in above:
            where = where[part]
        where[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=message.replace("(", r"\(").replace(")", r"\)")):
        load_arch(tmp_path)


def test_rope_scaling_replaces_rope_parameters_of_the_same_part(models: dict[str, Path], tmp_path: Path) -> None:
    """As in transformers, `rope_scaling` counts beside `text_config` only in a config.json without it."""
    config = json.loads((models["qwen2_5_vl"] / "config.json").read_text())
    text, other = config["text_config"], {"type": "mrope", "mrope_section": [2, 3, 3]}
    axes = []
    for where in (text, config):
        where["rope_scaling"] = other
        (tmp_path / "config.json").write_text(json.dumps(config))
        vision = load_arch(tmp_path).vision
        assert vision is not None
        axes.append([vision.axes.count(axis) for axis in range(3)])
        del where["rope_scaling"]
    assert axes == [[2, 3, 3], text["rope_parameters"]["mrope_section"]] and axes[0] != axes[1]


def test_turns_that_only_engines_would_take_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((models["qwen2_5_vl"] / "config.json").read_text())
    rope = "rope_scaling" if "rope_scaling" in config else "rope_parameters"
    config.get("text_config", config)[rope]["mrope_interleaved"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="mrope_interleaved must be false, not True"):
        load_arch(tmp_path)
