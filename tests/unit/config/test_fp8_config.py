"""fp8 settings that a machine or model does not support are refused before a process starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.config.derived import Machine
from mrl.config.fp8_shapes import token_unit
from mrl.config.loader import load
from mrl.config.problems import ConfigError, Problem
from mrl.config.schema import RLConfig
from mrl.fp8_chips import RECIPES, chip_problem
from mrl.platform.fp8 import version_problem
from mrl.preflight.machine import check_fp8
from tests.helpers.bad_configs import DENSE, PPO
from tools.bench import fp8_curves

WIDE = DENSE | {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}  # 256 / 4 heads of 64
EXPERTS = WIDE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 72,
}
KL = ("algorithm.kl={use_in_loss: true, coef: 0.1}",)
TP2, TP4 = ("actor.parallel={tensor: 2}",), ("actor.parallel={tensor: 4}",)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    judge = WIDE | {"architectures": ["Qwen2ForSequenceClassification"]}
    for name, config in {"dense": DENSE, "wide": WIDE, "experts": EXPERTS, "judge": judge}.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(config))
        Path(name, "model.safetensors").touch()
    Path("train.jsonl").write_text('{"prompt": "21=", "answer": "12."}\n')
    Path("c.yaml").write_text(PPO.replace("path: dense", "path: wide").replace("    pipeline: 2\n", ""))


def loaded(*overrides: str, gpus: int = 4) -> RLConfig:
    cfg = load("c.yaml", overrides, gpus=gpus)
    assert isinstance(cfg, RLConfig)
    return cfg


def fp8(text: str, model: str = "actor") -> str:
    return f"{model}.precision.fp8={{{text}}}"


REFUSED = {
    "no GPU": ([fp8("recipe: current")], 0, "actor.precision.fp8.recipe", ("needs GPUs", "has 0", "emulate: true")),
    "local layers": (
        [fp8("recipe: current"), "actor.layers=local"],
        4,
        "actor.precision.fp8.recipe",
        ("transformer-engine's layers", "actor.layers"),
    ),
    "emulated by transformer-engine": (
        [fp8("recipe: current, emulate: true"), "actor.layers=transformer_engine"],
        4,
        "actor.precision.fp8.emulate",
        ("mrl's own layers", "actor.layers"),
    ),
    "float32": (
        [fp8("recipe: current"), "model.dtype=float32"],
        4,
        "actor.precision.fp8.recipe",
        ("needs model.dtype bfloat16, not float32", "emulate: true", "model.dtype"),
    ),
    "settings without a recipe": (
        [fp8("head: true")],
        4,
        "actor.precision.fp8.head",
        ("no effect: no recipe", "actor.precision.fp8.recipe"),
    ),
    "a recipe that is none": (
        [fp8("recipe: tensorwise")],
        4,
        "actor.precision.fp8.recipe",
        ("tensorwise", "delayed, blockwise"),
    ),
    "a format of gradients alone": ([fp8("recipe: current, format: e5m2")], 4, "actor.precision.fp8.format", ("e4m3",)),
    "history of the present": (
        [fp8("recipe: current, history: 16")],
        4,
        "actor.precision.fp8.history",
        ("no effect", "current values"),
    ),
    "use of no history": (
        [fp8("recipe: blockwise, history_use: most_recent")],
        4,
        "actor.precision.fp8.history_use",
        ("no effect", "blockwise"),
    ),
    "margin of blocks": ([fp8("recipe: mxfp8, margin: 1")], 4, "actor.precision.fp8.margin", ("no effect", "mxfp8")),
    "weight gradients without fp8": (
        [fp8("recipe: blockwise, wgrad: false")],
        4,
        "actor.precision.fp8.wgrad",
        ("delayed", "blockwise"),
    ),
    "ends with delayed": (
        [fp8("recipe: delayed, first_last_bf16: 1")],
        4,
        "actor.precision.fp8.first_last_bf16",
        ("must be 0", "got 1"),
    ),
    "all layers at the ends": (
        [fp8("recipe: current, first_last_bf16: 4")],
        4,
        "actor.precision.fp8.first_last_bf16",
        ("4 layers at each end are 8", "of the model's 8"),
    ),
    "more than a stage": (
        [fp8("recipe: current, first_last_bf16: 3"), "actor.parallel={tensor: 1, pipeline: 4}"],
        4,
        "actor.precision.fp8.first_last_bf16",
        ("3 exceeds the 2 layers",),
    ),
    "weights in fp8, emulated": (
        [fp8("recipe: current, emulate: true, params: true")],
        0,
        "actor.precision.fp8.params",
        ("no effect", "actor.precision.fp8.emulate"),
    ),
    "weights in fp8 with delayed": (
        [fp8("recipe: delayed, params: true")],
        4,
        "actor.precision.fp8.params",
        ("another recipe than delayed",),
    ),
    "weights in fp8 with Muon": (
        [fp8("recipe: current, params: true"), "actor.optimizer.muon={}"],
        4,
        "actor.optimizer.muon",
        ("not been tested with weights in fp8", "actor.precision.fp8.params"),
    ),
    "a critic's head": (
        [fp8("recipe: current, head: true", "critic")],
        4,
        "critic.precision.fp8.head",
        ("no effect", "1 output"),
    ),
    "a reward model's head": (
        ["reward.function=null", "reward.manager=model", "reward.model.path=judge",
         fp8("recipe: current, head: true", "reward.model")],
        4,
        "reward.model.precision.fp8.head",
        ("no effect", "1 output"),
    ),
    "tokens under tensor parallelism": (
        [fp8("recipe: blockwise"), *TP2, "actor.max_tokens_per_microbatch=1000"],
        4,
        "actor.max_tokens_per_microbatch",
        ("1000", "256 tokens", "768 or 1024"),
    ),
    "tokens under context parallelism": (
        [fp8("recipe: current"), "actor.parallel={tensor: 1, context: 4}", "actor.max_tokens_per_microbatch=48"],
        4,
        "actor.max_tokens_per_microbatch",
        ("48", "64 tokens", "16 x tensor 1 x context 4"),
    ),
    "tokens of the reference alone": (
        [fp8("recipe: mxfp8"), *KL, "ref.max_tokens_per_microbatch=80"],
        4,
        "ref.max_tokens_per_microbatch",
        ("80", "64 tokens", "64 or 128"),
    ),
    "a hidden size": (
        [fp8("recipe: blockwise"), "model.path=dense", "actor.parallel={tensor: 1}"],
        4,
        "actor.precision.fp8.recipe",
        ("multiples of 128", "hidden size is 64"),
    ),
    "queries, keys and values of a rank": (
        [fp8("recipe: blockwise"), *TP4],
        4,
        "actor.precision.fp8.recipe",
        ("multiples of 128", "768 / 4 ranks = 192"),
    ),
    "attention of a rank": (
        [fp8("recipe: blockwise"), *TP4],
        4,
        "actor.precision.fp8.recipe",
        ("multiples of 128", "attention's output is 256 / 4 ranks = 64"),
    ),
    "experts of a rank": (
        [fp8("recipe: mxfp8"), "model.path=experts"],
        4,
        "actor.precision.fp8.recipe",
        ("multiples of 32", "72 / 2 ranks = 36", "actor.parallel.tensor"),
    ),
    "experts computed again": (
        [fp8("recipe: delayed"), "model.path=experts", "actor.parallel={tensor: 1}", "actor.recompute=selective"],
        4,
        "actor.recompute",
        ("4 experts", "delayed rules out"),
    ),
    "the critic's own model": (
        [fp8("recipe: mxfp8", "critic"), "critic.path=dense", "critic.parallel={tensor: 4}"],
        4,
        "critic.precision.fp8.recipe",
        ("multiples of 32", "64 / 4 ranks = 16"),
    ),
    "delayed twice": (
        [fp8("recipe: delayed"), fp8("recipe: delayed", "critic")],
        4,
        "critic.precision.fp8.recipe",
        ("2 models", "state of 1", "actor.precision.fp8.recipe"),
    ),
    "a reference that is the actor": (
        [*KL, "ref.policy=refreshed", "ref.refresh_every_steps=2", fp8("recipe: current, emulate: true", "ref")],
        0,
        "ref.precision",
        ("no effect", "runs in the actor"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_had_is_refused_with_its_numbers(case: str) -> None:
    overrides, gpus, key, says = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        loaded(*overrides, gpus=gpus)
    assert any(_says(problem, key, says) for problem in caught.value.problems), str(caught.value)


def _says(problem: Problem, key: str, parts: tuple[str, ...]) -> bool:
    return problem.keys[0] == key and all(part in str(problem) for part in parts)


@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise", "mxfp8"])
def test_the_same_recipe_fits_a_gpu_and_emulated_any_machine(recipe: str) -> None:
    real = loaded(fp8(f"recipe: {recipe}, head: true"), *TP2)
    emulated = loaded(fp8(f"recipe: {recipe}, head: true, emulate: true"), "model.dtype=float32", gpus=0)
    formats = {real.actor.precision.fp8.chosen_format, emulated.actor.precision.fp8.chosen_format}
    assert formats == {"hybrid" if recipe in ("current", "delayed") else "e4m3"}
    assert (
        token_unit(real.actor.parallel, recipe)
        == 2 * {"current": 16, "delayed": 16, "blockwise": 128, "mxfp8": 32}[recipe]
    )


def test_a_reference_has_the_actor_s_precision_and_a_reward_model_its_own() -> None:
    words = ["reward.function=null", "reward.manager=model", "reward.model.path=judge", *KL]
    built = loaded(fp8("recipe: current, emulate: true, head: true"), *words, gpus=0).built()
    recipes = {name: model.train.precision.fp8.recipe for name, model in built.items()}
    assert recipes == {"actor": "current", "critic": "none", "ref": "current", "reward": "none"}
    own = loaded(fp8("recipe: current, emulate: true"), "ref.precision={}", *KL, gpus=0).built()
    assert own["ref"].train.precision.fp8.recipe == "none"


def test_a_plan_for_gpus_elsewhere_is_not_asked_for_them_here() -> None:
    cfg = load("c.yaml", [fp8("recipe: mxfp8"), *TP2], planned=lambda cfg: Machine(8, 8, planned=True))
    assert token_unit(cfg.actor.parallel, "mxfp8") == 64
    assert token_unit(cfg.actor.parallel, "none") == 2


CHIPS = {
    "A100": ("current", (8, 0), (12, 4), ("8.9 or above", "this GPU has 8.0")),
    "L40S": ("blockwise", (8, 9), (12, 9), ("9.0 or above", "this GPU has 8.9")),
    "H100 with an older CUDA": ("blockwise", (9, 0), (12, 4), ("CUDA 12.9 or above", "built with 12.4")),
    "H200": ("mxfp8", (9, 0), (13, 0), ("10.0 or above and below 12.0", "this GPU has 9.0")),
    "a consumer's Blackwell": ("mxfp8", (12, 0), (13, 0), ("below 12.0", "this GPU has 12.0")),
}


@pytest.mark.parametrize("chip", CHIPS)
def test_a_chip_that_cannot_is_named_with_both_numbers(chip: str) -> None:
    recipe, capability, cuda, says = CHIPS[chip]
    problem = chip_problem(recipe, capability, cuda)
    assert problem is not None and all(part in problem for part in says), problem


def test_chips_and_versions_that_can() -> None:
    can = {
        name: [recipe for recipe in RECIPES if chip_problem(recipe, capability, cuda) is None]
        for name, (capability, cuda) in {
            "L40S": ((8, 9), (12, 4)),
            "H200": ((9, 0), (13, 0)),
            "B200": ((10, 0), (12, 9)),
        }.items()
    }
    assert can == {"L40S": ["current", "delayed"], "H200": ["current", "delayed", "blockwise"], "B200": [*RECIPES]}
    assert [version_problem(version) for version in ("2.9.0", "2.11.0+cu13")] == [None, None]
    for version in ("2.8.0", "2.12.0", "unknown"):
        assert f"{version} is installed; fp8 needs at least 2.9, below 2.12" in (version_problem(version) or "")


def test_preflight_tells_before_the_start_that_this_machine_has_no_fp8() -> None:
    found = list(check_fp8(loaded(fp8("recipe: current"), *TP2)))
    assert [(one.check, one.verdict) for one in found] == [("fp8", "problem")]
    assert "actor: precision.fp8.recipe current" in found[0].text
    assert not list(check_fp8(loaded(fp8("recipe: current, emulate: true"), gpus=0)))


@pytest.mark.parametrize("form", fp8_curves.FORMS)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_quickstart_is_ready_to_learn_in_every_form(algorithm: str, form: str) -> None:
    words = [*fp8_curves.overrides(algorithm, form, 1, 80), "model.path=wide"]
    file = fp8_curves.record.ROOT / "yaml_configs" / f"quickstart_{algorithm}.yaml"
    cfg = load(file, words, planned=lambda cfg: Machine(4, 4, planned=True))
    assert isinstance(cfg, RLConfig) and (cfg.run.seed, cfg.run.name) == (1, f"fp8_{algorithm}_{form}_1")
    recipes = {model.train.precision.fp8.recipe for model in cfg.built().values()}
    assert recipes == ({form} if form not in ("float32", "bfloat16") else {"none"})


def test_the_shipped_configuration_for_64_gpus_fits_its_recipe() -> None:
    file = fp8_curves.record.ROOT / "yaml_configs" / "ppo_llama70b_64gpu_fp8.yaml"
    model = f"model.path={fp8_curves.record.ROOT}/yaml_configs/models/Llama-3.1-70B"
    cfg = load(file, [model], planned=lambda cfg: Machine(64, 8, planned=True))
    assert isinstance(cfg, RLConfig)
    assert {name: m.train.precision.fp8.recipe for name, m in cfg.built().items()} == dict.fromkeys(
        ("actor", "critic", "ref"), "blockwise"
    )
    assert cfg.actor.max_tokens_per_microbatch % token_unit(cfg.actor.parallel, "blockwise") == 0
