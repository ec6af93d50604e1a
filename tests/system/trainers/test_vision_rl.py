"""Runs of `trainer: rl` on rows with images: PPO with a critic and the transformers engine, GRPO with SGLang.
Unsupported settings are refused before a process starts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from mrl.config.loader import ConfigError, load
from tests.helpers import zygote
from tests.helpers.tiny_vl import make_tiny_vl
from tests.helpers.vision_rows import vision_settings, write_rows

pytestmark = pytest.mark.longest

FAMILY = "qwen3_vl"
LAYOUT = {"qwen3_vl": {"tensor": 2}, "qwen2_5_vl": {"pipeline": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vision_rl")
    for family in LAYOUT:
        make_tiny_vl(root / family, family)
    make_tiny_vl(root / "patch_14", "qwen2_5_vl", patch=14)  # SGLang's Qwen2.5-VL supports no other size
    write_rows(root)
    return root


def settings(folder: Path, family: str, name: str, **more: Any) -> dict[str, Any]:
    return vision_settings(folder, folder / family, name, LAYOUT[family], **more)


def train(folder: Path, config: dict[str, Any], *overrides: str, fails: bool = False) -> str:
    file = folder / f"{config['run']['name']}.yaml"
    file.write_text(yaml.safe_dump(config))
    done = zygote.run("mrl", "train", file, *overrides, timeout_s=300)
    assert (done.returncode != 0) is fails, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def metrics(folder: Path, name: str) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "actor/loss" in row]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


SEEING = """
def score(prompt, response, row, pictures):
    assert len(pictures) == len(row["images"]) and all(picture.mode == "RGB" for picture in pictures)
    return len(set(response)) / 8 + sum(picture.width * picture.height for picture in pictures) / 1000
"""
PPO = {
    "critic": {"parallel": {"pipeline": 2}, "optimizer": {"lr": 0.005}, "max_tokens_per_microbatch": 150},
    "algorithm": {"adv_estimator": "gae", "kl": {"use_in_loss": True, "coef": 0.01}},
    "checkpoint": {"every_steps": 1, "export_hf": True},
}


@pytest.fixture(scope="module")
def whole(folder: Path) -> str:
    """Runs PPO with a critic and a reward function that gets the images; returns the terminal output."""
    (folder / "seeing.py").write_text(SEEING)
    reward = {"function": f"{folder / 'seeing.py'}:score", "pictures": True}
    return train(folder, settings(folder, FAMILY, "whole", reward=reward, **PPO))


def test_ppo_with_a_critic_samples_what_it_trains(folder: Path, whole: str) -> None:
    assert "the engine has the weights of step 0, all 104 tensors" in whole
    rows = metrics(folder, "whole")
    assert len(rows) == 2 and all(row["mismatch/max_abs"] < 1e-4 for row in rows)
    assert all(row["critic/loss"] > 0 and row["actor/grad_norm"] > 0 for row in rows)
    samples = (folder / "runs/whole/rollouts/step_1.jsonl").read_text()
    assert len(samples) < 20_000 and json.loads(samples.splitlines()[0])["row"]["images"] is not None

    card = (folder / "runs/whole/hf/README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card and "AutoModelForImageTextToText, AutoProcessor" in card
    after, before = weights(folder / "runs/whole/hf"), weights(folder / FAMILY)
    moved = {name for name in after if not after[name].equal(before[name])}
    assert any(name.startswith("model.visual.blocks.0") for name in moved), "the tower is trained"
    assert rows[-1]["perf/model_tflop"] > 0


@pytest.mark.slow
def test_both_models_of_a_checkpoint_are_converted(folder: Path, whole: str) -> None:
    checkpoint = folder / "runs/whole/checkpoints/step_2"
    for part in ("actor", "critic"):
        target = folder / f"converted_{part}"
        done = zygote.run("mrl", "convert", "megatron-to-hf", checkpoint, target, "--model", part, "--verify")
        assert done.returncode == 0 and "the same model" in done.stdout, done.stderr
    converted, exported = weights(folder / "converted_actor"), weights(folder / "runs/whole/hf")
    assert converted.keys() == exported.keys() and all(converted[name].equal(exported[name]) for name in exported)
    assert "score.weight" in weights(folder / "converted_critic")


@pytest.mark.slow
def test_a_frozen_tower_stays_as_it_is_when_memory_is_given_up_and_the_run_goes_on(folder: Path) -> None:
    checkpoint = {"every_steps": 1, "export_hf": True}
    config = settings(folder, "qwen2_5_vl", "frozen", checkpoint=checkpoint)
    config["model"]["vision"]["train"], config["actor"]["offload"] = False, "all"
    train(folder, config, "run.steps=1")
    assert "(step 1)" in train(folder, config)
    before, after = weights(folder / "qwen2_5_vl"), weights(folder / "runs/frozen/hf")
    assert before.keys() == after.keys()
    moved = {name for name in after if not after[name].equal(before[name])}
    assert moved and not any(name.startswith("visual.") for name in moved)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="the engine tests need sglang")
@pytest.mark.parametrize("family", LAYOUT)
@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "in-flight updates"])
def test_sglang_sees_what_the_trainer_sees_after_every_update_of_the_tower(
    folder: Path, family: str, is_async: bool
) -> None:
    name = f"sglang_{family}_{is_async}"
    config = settings(folder, family, name, rollout={"sampling": {"max_new_tokens": 40 if is_async else 8}})
    if is_async:
        config["rollout"] |= {"max_staleness": 1, "interrupt": "at_sync"}
        config["algorithm"]["rollout_correction"] = {"rollout_is": "token"}
    train(folder, config, "run.steps=3", *(["model.path=" + str(folder / "patch_14")] if "2_5" in family else []))
    rows = metrics(folder, name)
    fresh = "mismatch/age_0" if is_async else "mismatch/max_abs"
    assert len(rows) == 3 and max(row[fresh] for row in rows if fresh in row) < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["rollout.engine=sglang", "model.path=qwen2_5_vl"], "SGLang's Qwen2.5-VL supports only 1176"),
        (["actor.lora={rank: 4}"], "actor.lora: is not supported for vision models"),
        (["actor.precision.fp8={recipe: current, emulate: true}"], "fp8.recipe: is not supported for vision models"),
        (["actor.optimizer.muon={}"], "actor.optimizer.muon: does not train vision towers"),
        (["data.truncation=left"], "could truncate inside an image"),
        (
            ["actor.parallel.pipeline=4", "actor.parallel.tensor=1", "run.nproc=4"],
            "the first stage has 1 layers, and must have the 2",
        ),
        (["rollout.urls=[http://127.0.0.1:9]", "rollout.engine=sglang"], "model.vision.train"),
        (
            ["rollout.quantization=fp8", "rollout.engine=sglang"],
            "rollout.quantization: is not supported for vision models",
        ),
        (["agent={rollout: agent.py:play}"], "would lack the images"),
    ],
)
def test_what_is_not_supported_is_refused_before_a_process_starts(
    folder: Path, change: list[str], message: str
) -> None:
    change = [each.replace("model.path=", f"model.path={folder}/") for each in change]
    file = folder / "refused.yaml"
    file.write_text(yaml.safe_dump(settings(folder, "qwen3_vl", "refused")))
    with pytest.raises(ConfigError) as refused:
        load(file, change)
    assert message in str(refused.value)


def test_other_trainers_say_that_they_do_not_know_pictures(folder: Path, tmp_path: Path) -> None:
    model, rows = str(folder / "qwen3_vl"), str(folder / "rows.jsonl")
    config = {
        "trainer": "sft", "run": {"name": "sft", "root": str(tmp_path), "steps": 1}, "batch": {"samples_per_step": 1},
        "model": {"path": model, "dtype": "float32"}, "data": {"train": rows, "max_prompt_tokens": 100},
    }  # fmt: skip
    assert "sft does not support vision models: use rl, reward_model or dpo" in train(tmp_path, config, fails=True)


def test_a_picture_that_is_cut_off_is_refused_before_a_process_starts(folder: Path) -> None:
    cut = (folder / "0_0.png").read_bytes()[:50]
    (folder / "cut.png").write_bytes(cut)
    rows = [{"prompt": "what?", "images": images, "answer": "3"} for images in (["0_0.png"], ["cut.png"])]
    (folder / "cut.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = settings(folder, "qwen3_vl", "cut")
    config["data"]["train"] = str(folder / "cut.jsonl")
    said = train(folder, config, fails=True)
    assert "cut.jsonl:2: image 0: the file is truncated" in said and not (folder / "runs/cut/metrics.jsonl").exists()


def test_mrl_data_shows_what_the_model_sees(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(settings(folder, "qwen3_vl", "data")))
    done = zygote.run("mrl", "data", tmp_path / "data.yaml", "--samples", "6", "--sheet", tmp_path / "sheet.png")
    assert done.returncode == 0, done.stderr
    assert "6 images: " in done.stdout and "image: resized to" in done.stdout
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > 2 * 192 and sheet.height > 4 * 192


def test_a_reward_function_gets_the_pictures_that_it_asks_for(folder: Path, whole: str) -> None:
    config = settings(folder, FAMILY, "seeing", reward={"function": f"{folder / 'seeing.py'}:score"})
    assert "mrl calls it with (prompt, response, row)" in train(folder, config, fails=True)
    rows = [json.loads(line) for line in (folder / "runs/whole/rollouts/step_1.jsonl").read_text().splitlines()]
    assert {row["score"] > 1 for row in rows} == {True, False}, "the rows without pictures score less"
    assert all(len(json.dumps(row)) < 2000 for row in rows)

    held_out = (f"data.validation={folder / 'rows.jsonl'}", "reward.pictures=true")
    done = zygote.run("mrl", "eval", folder / "seeing.yaml", *held_out, "--rows", "3", "--out", folder / "eval")
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "eval" / "eval.json").read_text())
    assert [row["scores"][0] > 1 for row in found["samples"]] == [True, False, True]
