"""Conversion of vision-language models to Megatron and back: equal bits, and equal logits with an image."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.families import load_arch
from tests.helpers import zygote
from tests.helpers.tiny_vl import make_tiny_vl

WIDE = "visual.patch_embed.proj.weight"  # the tensor has five dimensions


def mrl(*arguments: str | Path) -> tuple[int, str, str]:
    done = zygote.run("mrl", *arguments, timeout_s=120)
    return done.returncode, done.stdout, done.stderr


def files(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_there_and_back_and_the_same_logits_with_a_picture(family: str, tmp_path: Path) -> None:
    model = make_tiny_vl(tmp_path / "hub", family, tied=family == "qwen2_5_vl", flat=family == "qwen2_5_vl")
    code, out, err = mrl("convert", "hf-to-megatron", model, tmp_path / "megatron", "--verify", "--workers", "2")
    assert code == 0, err
    assert "the same model" in out and "within 0.0001 " in out and "visual.blocks.*.norm1.weight" in out
    code, _, err = mrl("convert", "megatron-to-hf", tmp_path / "megatron", tmp_path / "back")
    assert code == 0, err
    before, after = files(model), files(tmp_path / "back")
    assert before.keys() == after.keys() and all(after[name].equal(before[name]) for name in before)
    assert load_arch(tmp_path / "back") == load_arch(model)
    assert (tmp_path / "back" / "preprocessor_config.json").is_file()


@pytest.mark.slow
def test_a_critic_is_made_of_a_policy_and_another_tower_is_another_model(tmp_path: Path) -> None:
    model = make_tiny_vl(tmp_path / "hub", "qwen3_vl")
    code, out, err = mrl("convert", "hf-to-megatron", model, tmp_path / "megatron", "--role", "critic", "--verify")
    assert code == 0 and "the same model" in out, err
    assert "Qwen3VLForSequenceClassification" in (tmp_path / "megatron" / "config.json").read_text()
    other = Path(shutil.copytree(model, tmp_path / "other"))
    tensors = files(other)
    (name,) = (name for name in tensors if name.endswith(WIDE))
    tensors[name][-1, -1, -1, -1, -1] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    code, out, _ = mrl("verify", other, tmp_path / "megatron", "--json", "--role", "critic")
    different = [text for group in json.loads(out)["groups"] for text in group["different"]]
    assert code == 1 and different == [f"{name}: 1 of 4608 values"]
