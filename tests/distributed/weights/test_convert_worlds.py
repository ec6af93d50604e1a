"""Converted models under every layout: the same bits as the Hugging Face directory, and the logits of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.weights.test_weights_worlds import (
    BOTH,
    EP2PP2,
    MODELS,
    MOE,
    OF_CRITICS,
    UNCUT,
    VPP2,
    World,
    check_parity,
    key,
    layout_of,
    write_reference,
)
from tests.helpers.slow import RUN_SLOW, slow_cases
from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world

TP1: dict[str, int] = {}  # four data-parallel replicas of the whole model
EP2 = {"expert": 2}
LAYOUTS = BOTH + [(model, TP1) for model in MODELS if RUN_SLOW or model == "llama"]
LAYOUTS += [(model, layout) for model in (*MOE, *UNCUT) for layout in (EP2PP2, *slow_cases(EP2))]
LAYOUTS += [("qwen2_tied", VPP2)]
RUNS = ("qwen3_moe", "gpt_oss", *slow_cases("qwen2_tied", "glm4_moe", "deepseek_v3", "qwen2_moe", "olmo3", "phi3"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {name: make_tiny(root / name, family, **settings) for name, (family, settings) in MODELS.items()}
    for path in made.values():
        write_reference(path, fused=False)
    return made


@pytest.fixture(scope="module")
def world(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> World:
    out = tmp_path_factory.mktemp("converted")
    jobs: list[tuple[str, str, dict[str, int]]] = [("convert", model, TP1) for model in MODELS]
    jobs += [(check, model, layout) for model, layout in LAYOUTS for check in ("load", "logits")]
    jobs += [("back", model, TP1) for model in MODELS]
    jobs += [("critic", model, x) for model, x in OF_CRITICS]
    jobs += [("run_checkpoint", model, x) for model, x in BOTH if model in RUNS]
    specs = [
        {
            "check": check,
            "model": str(models[model]),
            "converted": str(out / model),
            "layout": layout_of(model, layout),
            "out": str(out / key(check, model, layout)),
            "dtype": "float32",
        }
        for check, model, layout in jobs
    ]
    (out / "jobs.json").write_text(json.dumps(specs))
    run_world(4, "convert.py", out / "jobs.json", out / "results.json")
    results = json.loads((out / "results.json").read_text())
    return World({key(*job): result for job, result in zip(jobs, results, strict=True)}, out)


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=lambda x: x if isinstance(x, str) else str(x))
def test_a_converted_model_loads_under_every_layout(world: World, model: str, layout: dict[str, int]) -> None:
    """A converted model loads under every layout by mrl's loader (`trainer`) and by Megatron's own (`megatron`), which
    shares no code with the converter."""
    result = world("load", model, layout)
    assert result["parameters"] > 5
    assert result["trainer"] == []
    assert result["megatron"] == []
    check_parity(world("logits", model, layout))


@pytest.mark.parametrize("model", MODELS)
def test_there_and_back_is_the_same_model_to_transformers(world: World, models: dict[str, Path], model: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    back = world("back", model, TP1)
    assert back["wrong"] == []
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= set(back["files"])
    assert "model.safetensors.index.json" in back["files"] and "complete" not in back["files"]
    saved = world.out / key("back", model, TP1)
    _, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert set(info["unexpected_keys"]) <= {"score.bias"}, "for SGLang, which would make one up"
    tokenizer, original = (AutoTokenizer.from_pretrained(path) for path in (saved, models[model]))
    assert tokenizer.encode("12 = 3") == original.encode("12 = 3")
    assert tokenizer.chat_template == original.chat_template is not None


def test_the_ranks_of_a_world_share_the_work(world: World) -> None:
    files = world("convert", "llama", TP1)["files"]
    assert {f"release/__{rank}_0.distcp" for rank in range(4)} < set(files)
    assert {"complete", "config.json", "latest_checkpointed_iteration.txt", "tokenizer.json"} < set(files)
    assert {"release/.metadata", "release/common.pt", "release/metadata.json"} < set(files)


@pytest.mark.parametrize(("model", "layout"), OF_CRITICS)
def test_critics(world: World, model: str, layout: dict[str, int]) -> None:
    result = world("critic", model, layout)
    assert result["role"] == "critic", "config.json does not say that it has a score head"
    assert result["from_policy"] == result["converted"] == result["returned"] == []
    assert "does not use its tensor score.weight" in result["as_policy"]


@pytest.mark.parametrize(("model", "layout"), OF_CRITICS)
def test_an_exported_critic_is_a_classifier_to_transformers(world: World, model: str, layout: dict[str, int]) -> None:
    from transformers import AutoModelForSequenceClassification

    saved = world.out / key("critic", model, layout) / "again"
    got, info = AutoModelForSequenceClassification.from_pretrained(saved, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert set(info["unexpected_keys"]) <= {"score.bias"}, "for SGLang, which would make one up"
    assert got.score.weight[0].tolist() == list(range(got.config.hidden_size))


@pytest.mark.parametrize(("model", "layout"), [(model, x) for model, x in BOTH if model in RUNS])
def test_models_of_a_run_s_checkpoint(world: World, model: str, layout: dict[str, int]) -> None:
    result = world("run_checkpoint", model, layout)
    assert result["wrong"] == {"actor": [], "critic": []}
    assert "has no reward, only actor, critic" in result["other"]
    assert "--model-files" in result["bare"]
    assert result["same"], "the same weights, from a directory that does not know what it is"
