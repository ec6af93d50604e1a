"""LoRA adapters: the same under every layout, compatible with PEFT, merged, and saved."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from mrl.cli import main
from mrl.config.schema import LoRAConfig
from mrl.families import load_arch
from mrl.families.adapters import adapter_table, num_trained
from mrl.weights.disk.adapter_files import write_config
from mrl.weights.disk.base_digest import base_digest
from mrl.weights.errors import WeightError
from mrl.weights.merge import merge, read_adapter
from tests.helpers.slow import slow_cases
from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world

pytestmark = pytest.mark.long

LAYOUTS = (
    *("dense tp2.pp2", "dora tp2.cp2", "experts tp2.ep2", "dropout tp2.pp2/full"),
    *slow_cases("dense tp2.sequence0.cp2", "dense tp2.pp2/full", "dora tp2.pp2", "critic tp2.pp2", "moe tp2.ep2"),
    *slow_cases("dropout tp2.sequence0.cp2", "last tp2.pp2", "last pp2.vpp2/full"),
)
KINDS = tuple(dict.fromkeys(case.split()[0] for case in LAYOUTS))
SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2, "vocab_size": 321}
OLMO3: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": 2 * ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {"num_hidden_layers": 3, "num_key_value_heads": 4, "moe_intermediate_size": 32}
OTHER_KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # family -> which layers have adapters, and the model's size
    "gemma3_text": ("dense", {"num_hidden_layers": 4}),
    "deepseek_v3": ("moe", EXPERTS),
    **dict(slow_cases(("qwen2_moe", ("moe", EXPERTS)), ("gpt_oss", ("heads", {})), ("olmo3", ("dense", OLMO3)))),
}
OTHER_LAYOUTS = {"dense": "tp2.pp2", "moe": "tp2.ep2", "heads": "tp2.ep2"}
Reported = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Makes a dense model of four layers with tied embeddings, and a model with experts."""
    folder = tmp_path_factory.mktemp("models")
    dense = make_tiny(folder / "dense", "qwen2", tied=True, num_hidden_layers=4, **SHAPE)
    experts = SHAPE | {"head_dim": 16, "moe_intermediate_size": 32}
    return dense, make_tiny(folder / "moe", "qwen3_moe", **experts)


@pytest.fixture(scope="module")
def work(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reported]:
    """Returns the folder that the worlds write to, and their reports by case."""
    folder = tmp_path_factory.mktemp("lora")
    others = {}
    for family, (kind, shape) in OTHER_KINDS.items():
        others[f"{kind}={make_tiny(folder / family, family, **SHAPE | shape)}"] = OTHER_LAYOUTS[kind]
    run_world(1, "lora.py", folder, *models, *[f"{kind} one" for kind in (*KINDS, *others)])
    four = [*LAYOUTS, *(f"{case} {layout}" for case, layout in others.items()), "together"]
    output = run_world(4, "lora.py", folder, *models, *four)
    return folder, {case.pop("case"): case for case in map(json.loads, output.splitlines())}


@pytest.fixture(scope="module")
def reported(work: tuple[Path, Reported]) -> Reported:
    return work[1]


@pytest.mark.parametrize("case", LAYOUTS)
def test_gradients_and_what_updates_make_of_them_are_one_process_own(reported: Reported, case: str) -> None:
    found = reported[case]
    assert max(found[name] for name in ("out", "loss", "norm", "gradients")) < 1e-5
    assert found["after"] < 1e-4, "after three updates of Adam"
    assert found["smallest"] > 1e-3, "an adapter has no gradient"


@pytest.mark.parametrize("family", OTHER_KINDS)
def test_layers_of_other_kinds_have_them_too(work: tuple[Path, Reported], family: str) -> None:
    """Adapters work on other kinds of layers: with norms after the adapted layers, a scaled embedding, low-rank
    (latent) projections, norms over all heads after adapters, a gated expert, attention sinks and biases."""
    folder, reported = work
    kind, _ = OTHER_KINDS[family]
    found = reported[f"{kind}={folder / family} {OTHER_LAYOUTS[kind]}"]
    assert max(found[name] for name in ("out", "loss", "norm", "gradients")) < 2e-5, found
    if kind != "moe":  # some of its experts get no token
        assert found["smallest"] > 1e-3, "an adapter has no gradient"


def test_dropout_is_at_work_in_training_alone(work: tuple[Path, Reported]) -> None:
    plain, with_dropout = (torch.load(work[0] / f"{kind}_dense.pt") for kind in ("dense", "dropout"))
    assert torch.equal(plain["out"], with_dropout["out"])
    assert abs(float(plain["loss"] - with_dropout["loss"])) > 1e-4
    first = "model.layers.0.self_attn.q_proj.lora_B.weight"
    plain, dropped = (each["gradients"][first] for each in (plain, with_dropout))
    assert 0.1 < float((plain - dropped).norm() / plain.norm()) < 2


@pytest.mark.parametrize("kind", ["dense", "dora"])
def test_merged_weights_are_the_model_with_its_adapters(reported: Reported, kind: str) -> None:
    found = reported[f"merged {kind}"]
    assert found["gap"] < (1e-5 if kind == "dense" else 3e-5) and found["moved"] > 1
    assert found["untouched"], "merging has changed the model's own weights"


@pytest.mark.parametrize("kind", ["dense", "dora"])
def test_without_its_adapters_the_actor_is_the_model_that_it_began_with_to_the_bit(
    reported: Reported, kind: str
) -> None:
    assert reported[f"merged {kind}"]["off_is_base"] and reported[f"merged {kind}"]["on_again"]


@pytest.mark.parametrize("layout", ["tp2.pp2", "tp2.dp2", *slow_cases("pp2.vpp2.dp2", "tp2.cp2/full")])
def test_several_adapters_of_one_base_become_what_each_becomes_alone_to_the_bit(
    reported: Reported, layout: str
) -> None:
    found = reported[f"shared {layout}"]
    assert found["is_one_model"] and found["same_base"] and found["apart"] > 0.1
    assert found["same"] == {"both": [True, True], "loaded": [True, True]} and found["same_outputs"] == [True, True]


def test_gradients_have_room_for_adapters_alone(reported: Reported) -> None:
    found = reported["merged dense"]
    assert found["trained"] <= found["buffer"] < 0.3 * found["parameters"]


@pytest.mark.parametrize("kind", ["dora", *slow_cases("last")])
@pytest.mark.parametrize("layout", ["tp2.pp2", "pp2.vpp2"])
def test_a_checkpoint_of_adapters_goes_on_under_any_layout(reported: Reported, layout: str, kind: str) -> None:
    found = reported[f"resumed {kind} {layout}"]
    assert found["loaded"] == 0.0 and set(found["stored"].values()) == {0.0}
    assert found["continued"] <= (0.0 if layout == "tp2.pp2" else 1e-6)


def test_a_checkpoint_holds_adapters_alone(work: tuple[Path, Reported], models: tuple[Path, Path]) -> None:
    spec = LoRAConfig(rank=3, targets=("q_proj", "v_proj", "o_proj", "down_proj"), dora=True).spec
    complete = json.loads((work[0] / "saved_dora/checkpoints/step_2/complete").read_text())
    stored = complete["learners"]["actor"]["adapters"]
    numbers = num_trained(load_arch(models[0]), "policy", spec)
    assert (stored["rank"], stored["dora"], stored["alpha"]) == (3, True, 4.0)
    tensors = 4 * numbers * 4  # adapters, main weights and both moments in float32
    assert tensors < work[1]["resumed dora pp2.vpp2"]["size"] < tensors + 600_000, "names take the rest"


def test_a_checkpoint_is_refused_beside_other_weights_or_by_a_whole_model(reported: Reported) -> None:
    assert "the digest of the adapters' base weights is 000000" in reported["refused dora"]["base"]
    assert "LoRA adapters: set lora" in reported["refused dora"]["full"]


def peft_outputs(model: torch.nn.Module, seen: dict[str, Tensor], is_critic: bool) -> Tensor:
    """Returns the model's outputs for the response tokens of the samples that the world used."""
    found = []
    for tokens, prompt in zip(seen["tokens"].split(seen["lens"].tolist()), seen["prompts"].tolist(), strict=True):
        with torch.no_grad():
            if is_critic:
                inner: Any = model.base_model.model  # type: ignore[union-attr]
                found.append(inner.score(inner.model(tokens[None]).last_hidden_state)[0, prompt - 1 : -1, 0])
            else:
                scores = model(tokens[None]).logits[0].float().log_softmax(-1)
                found.append(scores[prompt - 1 : -1].gather(1, tokens[prompt:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["dense", "dora", "critic", *slow_cases("last")])
def test_peft_loads_them_and_computes_the_same(
    work: tuple[Path, Reported], models: tuple[Path, Path], kind: str
) -> None:
    peft = pytest.importorskip("peft")
    classes = {"critic": AutoModelForSequenceClassification}
    settings = {"num_labels": 1} if kind == "critic" else {}
    base = classes.get(kind, AutoModelForCausalLM).from_pretrained(models[0], dtype=torch.float32, **settings)
    model = peft.PeftModel.from_pretrained(base, str(work[0] / f"peft_{kind}")).eval()
    seen = torch.load(work[0] / f"peft_{kind}.pt")
    torch.testing.assert_close(peft_outputs(model, seen, kind == "critic"), seen["out"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["dense", "dora", *slow_cases("last")])
def test_mrl_merge_gives_the_weights_that_the_learner_exports(
    work: tuple[Path, Reported],
    models: tuple[Path, Path],
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["merge", str(models[0]), str(work[0] / f"peft_{kind}"), str(tmp_path / "out")]) == 0
    assert "not checked" not in capsys.readouterr().out, "the digest says that these are the weights"
    merged, want = load_file(tmp_path / "out/model.safetensors"), torch.load(work[0] / f"peft_{kind}.pt")["weights"]
    assert want.keys() - merged.keys() <= {"lm_head.weight"}
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-5, atol=1e-6)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.hidden_size == 32
    assert ModelCard.load(tmp_path / "out/README.md").data.base_model_relation == "merge"


def test_a_merged_critic_is_a_classifier(
    work: tuple[Path, Reported], models: tuple[Path, Path], tmp_path: Path
) -> None:
    merge(models[0], work[0] / "peft_critic", tmp_path / "out", 50_000)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    head = load_file(work[0] / "peft_critic/adapter_model.safetensors")["base_model.model.score.weight"]
    assert torch.equal(model.score.weight, head) and (tmp_path / "out/model.safetensors.index.json").is_file()


def test_a_head_is_not_rounded_to_the_type_of_what_it_is_merged_into(tmp_path: Path) -> None:
    half = make_tiny(tmp_path / "half", "qwen2", dtype=torch.bfloat16, **SHAPE)
    spec, arch = LoRAConfig(rank=2, alpha=2, targets=("q_proj",)).spec, load_arch(half)
    tensors = {
        f"base_model.model.{row.hf[0]}": torch.randn(row.shapes[0])
        for row in adapter_table(arch, "critic", spec).values()
    }
    (tmp_path / "adapter").mkdir()
    write_config(tmp_path / "adapter", "half", arch, "critic", spec, base_digest(half, False))
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    merge(half, tmp_path / "adapter", tmp_path / "out", 10**9)
    merged = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(merged["score.weight"], tensors["base_model.model.score.weight"])
    assert merged["model.norm.weight"].dtype == torch.bfloat16 and merged["score.bias"].count_nonzero() == 0


def test_merging_into_other_weights_is_refused_and_leaves_nothing(
    work: tuple[Path, Reported], models: tuple[Path, Path], tmp_path: Path
) -> None:
    other = make_tiny(tmp_path / "other", "qwen2", tied=True, seed=1, num_hidden_layers=4, **SHAPE)
    with pytest.raises(WeightError, match="is not the base model of the adapters"):
        merge(other, work[0] / "peft_dense", tmp_path / "out", 10**9)
    smaller = make_tiny(tmp_path / "smaller", "qwen2", tied=True, **SHAPE)
    with pytest.raises(WeightError, match=r"has no model.layers.2.mlp.down_proj.weight.*and \d+ more"):
        merge(smaller, work[0] / "peft_dense", tmp_path / "out", 10**9)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("bias", "all"), ("rank_pattern", {"q_proj": 2}), ("peft_type", "IA3"), ("r", 0), ("use_qalora", True)],
        *[("init_lora_weights", init) for init in ("pissa", "pissa_niter_4", "OLoRA", "loftq", "lora_ga")],
    ],
)
def test_adapters_that_would_be_computed_otherwise_are_refused_by_the_key(
    work: tuple[Path, Reported], tmp_path: Path, key: str, value: Any
) -> None:
    config = json.loads((work[0] / "peft_dense/adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(WeightError, match=f"adapter_config.json: not supported: {key} is"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    "carried",
    [
        "lm_head.base_layer.weight",
        "model.embed_tokens.base_layer.weight",
        "model.embed_tokens.lora_embedding_A",
        "model.norm.weight",
        "model.layers.0.self_attn.q_proj.base_layer.bias",
    ],
)
def test_weights_that_peft_saves_beside_adapters_are_refused_with_the_reason(tmp_path: Path, carried: str) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_A.weight": torch.ones(2, 8), f"{layer}.lora_B.weight": torch.ones(8, 2)}
    save_file(tensors | {f"base_model.model.{carried}": torch.ones(4, 8)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(WeightError, match=rf"{re.escape(carried)}\. PEFT saves these .*merge_and_unload"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ((2, 64), (32, 2), r"A is \[2, 64\] instead of \[4, 64\], for a weight \[32, 64\] and r 4; .* B is \[32, 2\]"),
        ((4, 64), (32, 2), r"B is \[32, 2\] instead of \[32, 4\]"),
        ((4,), (32, 4), r"A is \[4\] instead of \[4, 64\]"),
    ],
)
def test_adapters_of_another_rank_than_their_configuration_says_are_not_merged(
    models: tuple[Path, Path], tmp_path: Path, a: tuple[int, ...], b: tuple[int, ...], said: str
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    layer = "base_model.model.model.layers.0.mlp.down_proj"
    tensors = {f"{layer}.lora_A.weight": torch.ones(a), f"{layer}.lora_B.weight": torch.ones(b)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(WeightError, match=f"does not fit the base weights: model.layers.0.mlp.down_proj: {said}"):
        merge(models[0], tmp_path, tmp_path / "out", 10**9)


def test_adapters_out_of_a_checkpoint_are_those_that_the_run_had(
    work: tuple[Path, Reported], models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, files = str(work[0] / "saved_dora/checkpoints/step_2"), ["--model-files", str(models[0])]
    assert main(["convert", "megatron-to-hf", step, str(tmp_path / "weights"), *files]) == 1
    said = capsys.readouterr().err
    assert "only adapters" in said and "--adapter" in said
    assert main(["convert", "megatron-to-hf", step, str(tmp_path / "adapter"), "--adapter", *files]) == 0
    spec = LoRAConfig(rank=3, alpha=4, targets=("q_proj", "v_proj", "o_proj", "down_proj"), rslora=True, dora=True).spec
    file = read_adapter(tmp_path / "adapter")
    assert file.config.scale == pytest.approx(spec.scale) and file.config.base_digest is not None
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    table = adapter_table(load_arch(models[0]), "policy", spec)
    assert {f"base_model.model.{row.hf[0]}" for row in table.values()} == tensors.keys()
    at_save, one = torch.load(work[0] / "at_save_dora.pt"), "model.layers.1.self_attn.o_proj.lora_A.weight"
    assert torch.equal(tensors[f"base_model.model.{one}"], at_save[one])


def test_bfloat16_weights_say_what_rounding_costs(
    work: tuple[Path, Reported], models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Merging into bfloat16 weights reports the loss by rounding, which takes most of a small adapter."""
    tensors = load_file(work[0] / "peft_dense/adapter_model.safetensors")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((work[0] / "peft_dense" / name).read_bytes())
    save_file({n: t * 1e-3 if "lora_B" in n else t for n, t in tensors.items()}, tmp_path / "adapter_model.safetensors")
    half = make_tiny(tmp_path / "half", "qwen2", tied=True, num_hidden_layers=4, dtype=torch.bfloat16, **SHAPE)
    result = merge(half, tmp_path, tmp_path / "out", 10**9)
    assert 0.3 < (result.lost / result.added) ** 0.5 and not result.is_checked
