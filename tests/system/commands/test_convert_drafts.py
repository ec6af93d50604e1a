"""Multi-token prediction layers in a run and in the converter: both copy them bit for bit from the initial weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.weights.disk.safetensors_io import HFCheckpoint
from tests.conftest import TinyModels
from tests.helpers import sft_config, zygote

DRAFTS = {
    "model.layers.2.eh_proj.weight": torch.randn(64, 128),
    "model.layers.2.enorm.weight": torch.randn(64).bfloat16(),
}


def mrl(*arguments: str | Path) -> str:
    done = zygote.run("mrl", *arguments, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def write(path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(shutil.copytree(tiny_models("glm4_moe"), tmp_path_factory.mktemp("drafts") / "model"))
    write(path, load_file(path / "model.safetensors") | DRAFTS)
    return path


def has_drafts(directory: Path) -> bool:
    with HFCheckpoint(directory) as checkpoint:
        found = {name: checkpoint.source(name)[:] for name in DRAFTS if name in checkpoint}
    assert not found or all(torch.equal(found[name], tensor) for name, tensor in DRAFTS.items())
    assert not found or all(found[name].dtype == tensor.dtype for name, tensor in DRAFTS.items())
    counted = json.loads((directory / "config.json").read_text())["num_nextn_predict_layers"]
    assert counted == bool(found)
    return bool(found)


def train(model: Path, folder: Path, *overrides: str) -> str:
    """Trains one step of SFT, with a checkpoint and an export."""
    validation = {"patience": None, "min_delta": 0.0, "keep_best": False}
    run, saved = {"steps": 1}, {"every_steps": 1}
    config = sft_config.write(folder, model, validation=validation, checkpoint=saved, run=run)
    return mrl("train", config, *overrides)


def test_there_and_back(model: Path, tmp_path: Path) -> None:
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    said = mrl("convert", "hf-to-megatron", model, megatron, "--verify", "--skip-logits", "--dtype", "bfloat16")
    assert "copied: MTP layers" in said and f"{megatron}: its multi-token prediction layers are copies" in said
    assert json.loads((megatron / "config.json").read_text())["num_nextn_predict_layers"] == 1
    mrl("convert", "megatron-to-hf", megatron, back, "--verify", "--skip-logits", "--shard-gb", "0.0001")
    assert has_drafts(back)
    changed = Path(shutil.copytree(model, tmp_path / "changed"))
    write(changed, load_file(model / "model.safetensors") | {"model.layers.2.eh_proj.weight": torch.ones(64, 128)})
    done = zygote.run("mrl", "verify", changed, megatron, "--skip-logits", timeout_s=120)
    assert done.returncode == 1 and "model.layers.2.eh_proj.weight: " in done.stdout, done.stdout
    write(changed, {k: v for k, v in load_file(model / "model.safetensors").items() if "enorm" not in k})
    done = zygote.run("mrl", "verify", changed, megatron, "--skip-logits", timeout_s=120)
    assert f"{changed} lacks model.layers.2.enorm.weight" in done.stdout, done.stdout


def test_a_run_exports_the_layers_of_its_initial_weights(model: Path, tmp_path: Path) -> None:
    said = train(model, tmp_path)
    hf, step = tmp_path / "runs/run/hf", tmp_path / "runs/run/checkpoints/step_1"
    assert has_drafts(hf) and f"{hf}: its multi-token prediction layers are copies of those in {model}" in said
    assert "they were not trained together with these weights" in (hf / "README.md").read_text()
    mrl("convert", "megatron-to-hf", step, tmp_path / "converted", "--verify", "--skip-logits")
    assert has_drafts(tmp_path / "converted")
    gone = Path(shutil.copytree(model, tmp_path / "gone"))
    (gone / "model.safetensors").unlink()
    arguments = ("convert", "megatron-to-hf", step, tmp_path / "none", "--model-files", gone)
    done = zygote.run("mrl", *arguments, timeout_s=120)
    assert done.returncode == 1 and "restore them, or set the key to 0 there" in done.stderr
    assert not (tmp_path / "none").exists()
    config = json.loads((gone / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (gone / "config.json").write_text(json.dumps(config))
    mrl(*arguments)
    assert not has_drafts(tmp_path / "none")


def test_random_initial_weights_have_none(model: Path, tmp_path: Path) -> None:
    assert "it is without the multi-token prediction layers" in train(model, tmp_path, "model.from_scratch=true")
    assert not has_drafts(tmp_path / "runs/run/hf")
    mrl("convert", "megatron-to-hf", tmp_path / "runs/run/checkpoints/step_1", tmp_path / "converted")
    assert not has_drafts(tmp_path / "converted")
