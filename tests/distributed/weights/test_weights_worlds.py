"""Conversion from Hugging Face to Megatron and back, and transformers' logits, for every family on several ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.slow import slow_cases
from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world

pytestmark = pytest.mark.long

LENGTHS = (37, 2, 64, 1, 24)  # packed sequences; the sum is a multiple of every alignment in use
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 0.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}
ALL_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3, "num_hidden_layers": 3}),
    "llama_tied": ("llama", {"rope_parameters": LLAMA3, "tied": True, "vocab_size": 323}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"vocab_size": 321}),
    "qwen2_tied": ("qwen2", {"tied": True, "num_hidden_layers": 4}),
    "qwen3": ("qwen3", {"vocab_size": 337}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True, "vocab_size": 331}),
    "qwen3_moe_raw": ("qwen3_moe", {"norm_topk_prob": False}),
    "glm4_moe": ("glm4_moe", {"num_hidden_layers": 4}),
    "deepseek_v3": ("deepseek_v3", {"num_hidden_layers": 4}),
    "gemma3_text": ("gemma3_text", {"vocab_size": 323}),
    "qwen2_moe": ("qwen2_moe", {"mlp_only_layers": [0]}),
    "olmo3": ("olmo3", {"vocab_size": 323}),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", {}),
    "gpt_oss": ("gpt_oss", {"vocab_size": 323}),
}
NAMES = ("llama", "llama_tied", "qwen2", "qwen2_tied", "qwen3_moe", "deepseek_v3", "gemma3_text", "gpt_oss")
NAMES += slow_cases(*(name for name in ALL_MODELS if name not in NAMES))
MODELS = {name: ALL_MODELS[name] for name in NAMES}
UNCUT = ("gpt_oss",)  # its experts cannot be split over tensor-parallel ranks
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_moe_raw", "glm4_moe", "deepseek_v3")
MOE = tuple(name for name in EXPERTS if name in MODELS)
CRITICS = ("llama_tied", "gemma3_text", "deepseek_v3", "gpt_oss", *slow_cases("qwen3", "mixtral", "qwen2_moe"))
CRITICS += slow_cases("olmo3", "phi3", "smollm3")
ONE: dict[str, int] = {}
IN_ONE_PROCESS = ("llama_tied", *slow_cases(*(name for name in MODELS if name != "llama_tied")))
TP2PP2 = {"tensor": 2, "pipeline": 2}
EP2PP2 = {"pipeline": 2, "expert": 2}
VPP2 = {"pipeline": 2, "virtual_pipeline": 2}
TP2EP2 = {"tensor": 2, "expert": 2}
ETP2EP2 = {"tensor": 2, "expert": 2, "expert_tensor": 2}


BOTH = [(model, TP2EP2 if model in UNCUT else TP2PP2) for model in MODELS]  # each in both kinds of splits
WITH_EXPERTS = [(model, EP2PP2) for model in (*MOE, *UNCUT)] + [(model, TP2EP2) for model in MOE]
OF_CRITICS = [(model, TP2EP2 if model in UNCUT else TP2PP2) for model in CRITICS]


def layout_of(model: str, layout: dict[str, int]) -> dict[str, int]:
    """Returns the layout; a three-layer model gets uneven pipeline stages."""
    return {**layout, "first_stage_layers": 1, "last_stage_layers": 2} if model == "llama" and layout else layout


SAVED = [("qwen2_tied", TP2PP2), ("llama", TP2PP2), ("qwen3_moe", ETP2EP2), ("gpt_oss", EP2PP2)]
SAVED += slow_cases(("mistral", TP2PP2), ("mixtral", EP2PP2))


@dataclass(frozen=True)
class World:
    """Results of a world by (check, model, layout)."""

    results: dict[str, Any]
    out: Path

    def __call__(self, check: str, model: str, layout: dict[str, int]) -> Any:
        return self.results[key(check, model, layout)]


def key(check: str, model: str, layout: dict[str, int]) -> str:
    return f"{check}-{model}-{'.'.join(f'{k}{v}' for k, v in layout.items())}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {}
    for name, (family, settings) in MODELS.items():
        made[name] = make_tiny(root / name, family, **settings)
        write_reference(made[name], fused=name in MOE)
    return made


def write_reference(path: Path, fused: bool) -> None:
    """Writes transformers' logits of each sequence alone; if `fused`, also the model with fused experts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    g = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, model.config.vocab_size, (n,), generator=g) for n in LENGTHS]
    with torch.no_grad():
        logits = torch.cat([model(sequence[None]).logits[0] for sequence in sequences])
    reference = {
        "tokens": torch.cat(sequences)[None],
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32),
        "max_seqlen": max(LENGTHS),
        "logits": logits,
    }
    torch.save(reference, path / "reference.pt")
    if fused:
        model.save_pretrained(path / "fused", save_original_format=False)


def checked(size: int, jobs: list[tuple[str, str, dict[str, int]]], models: dict[str, Path], out: Path) -> World:
    specs = [
        {
            "check": check,
            "model": str(models[model]),
            "layout": layout_of(model, layout),
            "out": str(out / key(check, model, layout)),
            "dtype": "bfloat16" if check == "save" and model == "mistral" else "float32",
        }
        for check, model, layout in jobs
    ]
    (out / "jobs.json").write_text(json.dumps(specs))
    run_world(size, "weights.py", out / "jobs.json", out / "results.json")
    results = json.loads((out / "results.json").read_text())
    return World({key(*job): result for job, result in zip(jobs, results, strict=True)}, out)


@pytest.fixture(scope="module")
def one(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> World:
    jobs = [(check, model, ONE) for model in IN_ONE_PROCESS for check in ("round_trip", "logits")]
    jobs += [("critic", "llama_tied", ONE), ("padding_is_zero", "llama_tied", ONE)]
    return checked(1, jobs, models, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def four(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> World:
    jobs = [(check, model, x) for model, x in BOTH + WITH_EXPERTS for check in ("round_trip", "logits")]
    jobs += [(check, model, ETP2EP2) for model in MOE for check in ("round_trip", "from_fused_experts")]
    jobs += [(check, "qwen2_tied", VPP2) for check in ("round_trip", "logits")]
    jobs += [("critic", model, x) for model, x in OF_CRITICS]
    jobs += [("save", model, x) for model, x in SAVED]
    jobs += [("padding_is_zero", model, TP2PP2) for model in ("llama_tied", "qwen2")]
    jobs += [("attributes", model, x) for model, x in (("llama_tied", TP2PP2), ("qwen3_moe", ETP2EP2))]
    jobs += [(check, "qwen2_tied", TP2PP2) for check in ("load_errors", "tied_copy_forgotten", "save_errors")]
    return checked(4, jobs, models, tmp_path_factory.mktemp("four"))


def check_parity(result: dict[str, float]) -> None:
    assert result["scale"] > 1, "logits so small that anything would be equal"
    assert 0 <= result["error"] <= 1e-4 * result["scale"]


@pytest.mark.parametrize("model", IN_ONE_PROCESS)
def test_one_process(one: World, model: str) -> None:
    assert one("round_trip", model, ONE) == []
    check_parity(one("logits", model, ONE))


@pytest.mark.parametrize(("model", "layout"), BOTH)
def test_tensor_parallel(four: World, model: str, layout: dict[str, int]) -> None:
    assert four("round_trip", model, layout) == []
    check_parity(four("logits", model, layout))


@pytest.mark.parametrize(("model", "layout"), WITH_EXPERTS)
def test_expert_parallel(four: World, model: str, layout: dict[str, int]) -> None:
    assert four("round_trip", model, layout) == []
    check_parity(four("logits", model, layout))


@pytest.mark.parametrize("model", MOE)
def test_experts_cut_by_their_own_tensor_parallelism(four: World, model: str) -> None:
    assert four("round_trip", model, ETP2EP2) == []
    assert four("from_fused_experts", model, ETP2EP2) == []


def test_virtual_pipeline(four: World) -> None:
    assert four("round_trip", "qwen2_tied", VPP2) == []
    check_parity(four("logits", "qwen2_tied", VPP2))


def test_vocabulary_padding_is_zero(one: World, four: World) -> None:
    assert one("padding_is_zero", "llama_tied", ONE) == 0.0
    assert four("padding_is_zero", "llama_tied", TP2PP2) == 0.0
    assert four("padding_is_zero", "qwen2", TP2PP2) == 0.0


@pytest.mark.parametrize(("model", "layout"), OF_CRITICS)
def test_critic_starts_from_a_policy_and_comes_back(one: World, four: World, model: str, layout: Any) -> None:
    results = [four("critic", model, layout)] + ([one("critic", model, ONE)] if model == "llama_tied" else [])
    for result in results:
        assert result["fresh"] == 0.0
        assert result["wrong"] == []
        assert result["head_back"]
        assert "does not use its tensor score.weight" in result["as_policy"]


@pytest.mark.parametrize(("model", "layout"), SAVED)
def test_saved_directory_is_the_same_model_to_transformers(
    models: dict[str, Path], four: World, model: str, layout: dict[str, int]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = four.out / key("save", model, layout)
    dtype = torch.bfloat16 if model == "mistral" else torch.float32
    files = list(saved.glob("model-*.safetensors"))
    assert len(files) > 2 and (saved / "generation_config.json").is_file()
    assert json.loads((saved / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    got, info = AutoModelForCausalLM.from_pretrained(saved, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    want = AutoModelForCausalLM.from_pretrained(models[model], dtype=dtype)
    assert got.dtype == dtype
    for (name, tensor), other in zip(want.state_dict().items(), got.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name
    tokenizer, original = (AutoTokenizer.from_pretrained(path) for path in (saved, models[model]))
    assert tokenizer.encode("12 = 3") == original.encode("12 = 3")
    assert tokenizer.chat_template == original.chat_template is not None


def test_leftovers_on_either_side_are_one_error(four: World) -> None:
    errors = four("load_errors", "qwen2_tied", TP2PP2)
    text = errors["leftovers"]
    assert "no tensor model.layers.1.mlp.up_proj.weight" in text
    assert "does not use its tensor model.layers.9.mlp.up_proj.weight" in text
    assert "model.norm.weight has shape [5], and config.json requires [64]" in text
    assert text.count("layers.9") == 1
    assert "the model has no parameter decoder.layers.4.mlp.linear_fc1.weight" in errors["too_small"]
    assert "nowhere is not a directory" in errors["missing"]


def test_an_output_layer_beside_tied_embeddings_must_equal_them(four: World) -> None:
    errors = four("load_errors", "qwen2_tied", TP2PP2)
    assert errors["tied_twice"] == errors["inv_freq"] == "no error"
    assert "model.safetensors: lm_head.weight differs from model.embed_tokens.weight" in errors["untied"]
    assert "config.json has tie_word_embeddings: true" in errors["untied"]


@pytest.mark.parametrize(("case", "name"), [("nan", "layers.1.self_attn.k_proj"), ("infinity", "embed_tokens")])
def test_a_weight_that_is_no_number_is_named(four: World, case: str, name: str) -> None:
    error = four("load_errors", "qwen2_tied", TP2PP2)[case]
    assert f"{case}/model.safetensors: model.{name}.weight contains NaN or infinity" in error


def test_a_forgotten_tied_copy_is_an_error(four: World) -> None:
    text = four("tied_copy_forgotten", "qwen2_tied", TP2PP2)
    assert "tied embeddings of the first and the last pipeline stage differ" in text


def test_tensor_parallel_marks_are_set_by_loading(four: World) -> None:
    assert four("attributes", "llama_tied", TP2PP2) == []
    assert four("attributes", "qwen3_moe", ETP2EP2) == []


def test_saving_is_all_or_nothing(four: World) -> None:
    result = four("save_errors", "qwen2_tied", TP2PP2)
    assert "No space left on device" in result["disk"] and result["tries"] == 1
    assert result["untouched"]
    assert "exists and is not empty" in result["taken"]
    assert len(result["files"]) > 1 and "model.safetensors" not in result["files"]
    assert result["left"] == []
