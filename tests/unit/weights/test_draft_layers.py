"""Multi-token prediction layers: exports copy them bit for bit, and never drop them without a note."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.cards import merged_card
from mrl.cards.base_model import export_kind
from mrl.cards.text import STALE_DRAFTS
from mrl.config.schema import SFTConfig
from mrl.families import has_draft_layers, load_arch
from mrl.weights.disk.digest import file_digests, weight_files
from mrl.weights.disk.draft_layers import draft_metas, draft_note, is_draft
from mrl.weights.disk.safetensors_io import HFCheckpoint
from mrl.weights.errors import WeightError
from mrl.weights.merge import merge
from mrl.weights.model.export import save_hf
from tests.conftest import TinyModels
from tests.unit.weights.test_weights_files import OneRank

COUNT = "num_nextn_predict_layers"
DRAFTS = {
    "model.layers.2.eh_proj.weight": torch.randn(64, 128).bfloat16(),
    "model.layers.2.enorm.weight": torch.tensor([float("nan"), -0.0] * 32),  # bits, not values, are copied
    "model.layers.2.shared_head.head.weight": torch.randn(320, 64),
}


@pytest.fixture
def model(tiny_models: TinyModels, tmp_path: Path) -> Path:
    """Makes a model with a prediction layer after its last layer."""
    path = Path(shutil.copytree(tiny_models("glm4_moe"), tmp_path / "model"))
    save_file(load_file(path / "model.safetensors") | DRAFTS, path / "model.safetensors")
    count(path, 1)
    return path


def count(path: Path, layers: int) -> None:
    config = json.loads((path / "config.json").read_text()) | {COUNT: layers}
    (path / "config.json").write_text(json.dumps(config))


def counted(path: Path) -> int:
    return int(json.loads((path / "config.json").read_text())[COUNT])


def export(model: Path, target: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Exports a trunk of two tensors; returns the other tensors of the export."""
    trunk = {"model.embed_tokens.weight": torch.ones(4, 8), "model.norm.weight": torch.zeros(8)}
    save_hf(OneRank(trunk, model), model, target, **options)  # type: ignore[arg-type]
    with HFCheckpoint(target) as checkpoint:
        found = {name: checkpoint.source(name)[:] for name in checkpoint}
    assert all(torch.equal(found[name], tensor) for name, tensor in trunk.items())
    return {name: tensor for name, tensor in found.items() if name not in trunk}


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, bytes]]:
    return {name: (t.dtype, t.contiguous().view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()}


@pytest.mark.parametrize("file_bytes", [1 << 30, 20_000])
def test_an_export_copies_them_to_the_bit(model: Path, tmp_path: Path, file_bytes: int) -> None:
    described: list[dict[str, str]] = []
    target = tmp_path / "hf"
    found = export(
        model, target, drafts=model, max_file_bytes=file_bytes, describe=lambda _, digests: described.append(digests)
    )
    assert bits(found) == bits(DRAFTS) and counted(target) == 1
    assert described == [file_digests(weight_files(target))]
    assert draft_note(model, target).startswith(f"its multi-token prediction layers are copies of those in {model}")
    assert export_kind(target).has_drafts and "not trained together" in STALE_DRAFTS


def test_an_export_without_them_counts_none_and_says_so(model: Path, tmp_path: Path) -> None:
    assert export(model, tmp_path / "hf") == {} and counted(tmp_path / "hf") == 0
    assert "it is without the multi-token prediction layers" in draft_note(model, tmp_path / "hf")
    assert not export_kind(tmp_path / "hf").has_drafts


def test_weights_without_the_layers_that_config_json_counts(model: Path, tmp_path: Path) -> None:
    """Without the layers that config.json counts, as transformers saves, the export counts 0 and has a note."""
    save_file({k: v for k, v in load_file(model / "model.safetensors").items() if k not in DRAFTS}, model / "m")
    (model / "m").rename(model / "model.safetensors")
    assert export(model, tmp_path / "hf", drafts=model) == {} and counted(tmp_path / "hf") == 0
    assert "it is without" in draft_note(model, tmp_path / "hf")


def test_a_model_without_such_layers_has_none_and_no_note(tiny_models: TinyModels, tmp_path: Path) -> None:
    model = tiny_models("glm4_moe")
    assert draft_metas(model, load_arch(model), "policy") == [] and draft_note(model, model) == ""
    assert draft_note(tiny_models("llama"), tmp_path) == ""


def test_a_critic_has_none(model: Path) -> None:
    arch = load_arch(model)
    assert draft_metas(model, arch, "critic") == [] and len(draft_metas(model, arch, "policy")) == len(DRAFTS)


def test_weights_that_are_gone_are_one_error_and_no_directory(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(WeightError, match=f"no weights .*{COUNT}.* restore them, or set the key to 0 there"):
        export(model, tmp_path / "hf", drafts=model)
    assert not (tmp_path / "hf").exists()
    count(model, 0)
    assert export(model, tmp_path / "hf", drafts=model) == {}


def test_a_merge_keeps_them_and_their_count(model: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 2, "target_modules": ["o_proj"]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    with HFCheckpoint(model) as checkpoint:
        out, into = checkpoint.source("model.layers.0.self_attn.o_proj.weight").shape
    name = "base_model.model.model.layers.0.self_attn.o_proj.lora_"
    tensors = {f"{name}A.weight": torch.ones(2, into), f"{name}B.weight": torch.ones(out, 2)}
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    merge(model, tmp_path / "adapter", tmp_path / "out", 1 << 30)
    written = load_file(tmp_path / "out/model.safetensors")
    assert bits({name: written[name] for name in DRAFTS}) == bits(DRAFTS) and counted(tmp_path / "out") == 1
    assert merged_card(model, tmp_path / "adapter", tmp_path / "out", tmp_path / "out", 1, 0.0) == ""
    assert STALE_DRAFTS in (tmp_path / "out/README.md").read_text()


def test_a_resumed_run_compares_the_weights_that_its_exports_copy(model: Path) -> None:
    rows = {"run": {"name": "x"}, "data": {"train": "-"}, "batch": {"samples_per_step": 1}}
    for from_scratch, layers, is_read in ((False, 1, True), (True, 1, False), (False, 0, False)):
        count(model, layers)
        section = {"path": str(model), "from_scratch": from_scratch}
        cfg = SFTConfig.model_validate({"trainer": "sft", "model": section, **rows})
        assert (("model.path", str(model)) in list(cfg.reread_files())) is is_read


def test_layers_of_a_family_without_a_count_are_found_by_name(tmp_path: Path) -> None:
    """Layers of a family without a count in config.json are found by name. Qwen3-Next has no count; Qwen3.5 has one."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next"}))
    assert not has_draft_layers(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for name, found in (("model.norm.weight", False), ("mtp.fc.weight", True)):
        index.write_text(json.dumps({"weight_map": {name: "a.safetensors"}}))
        assert has_draft_layers(tmp_path) == found
    arch = SimpleNamespace(family="qwen3_next", num_layers=2)
    names = ["mtp.layers.0.mlp.gate.weight", "model.layers.2.mlp.gate.weight"]
    assert [is_draft(arch, name) for name in names] == [True, False]  # type: ignore[arg-type]
