"""Plans of all shipped recipes: they fit what their names promise, and match docs/planning.md."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.config.loader import load
from mrl.config.sections.run import ResilienceConfig
from mrl.config.trainers.table import trainer_of
from mrl.config.tree import read
from mrl.plan.chips import CHIPS, Cluster
from mrl.plan.memory import elements_of_model
from mrl.plan.plan import machine_of
from tests.conftest import TinyModels
from tests.helpers.diffusion_tools import tiny_directory
from tests.helpers.tiny_vl import make_tiny_vl
from tests.unit.plan.test_plan import ROOT, plan_of, recipe

YAMLS = sorted(path.stem for path in (ROOT / "yaml_configs").glob("*.yaml"))
RECIPES = {  # with the number of GPUs that the name promises
    "ppo_llama70b_64gpu": 64,
    "ppo_llama70b_64gpu_16k": 64,
    "ppo_llama70b_64gpu_fp8": 64,
    "grpo_qwen32b_16gpu": 16,
    "grpo_qwen3_30b_a3b_32gpu": 32,
    "grpo_async_qwen7b_16gpu": 16,
    "grpo_tools_qwen7b_8gpu": 8,
    "grpo_verifiers_qwen7b_8gpu": 8,
    "dapo_qwen7b_8gpu": 8,
    "sft_qwen7b_8gpu": 8,
    "dpo_qwen7b_8gpu": 8,
    "rm_qwen7b_8gpu": 8,
    "grpo_qwen0.6b_1gpu": 1,
    "distill_qwen0.6b_1gpu": 1,
    "grpo_lora_qwen7b_1gpu": 1,
    "grpo_adapters_qwen7b_1gpu": 1,
    "sft_lora_llama70b_8gpu": 8,
    "ddpo_sd15_1gpu": 1,
    "flow_grpo_sd3_8gpu": 8,
    "grpo_qwen25vl_7b_8gpu": 8,
    "ppo_qwen3vl_8b_16gpu": 16,
}


DRAWING = ("ddpo_sd15_1gpu", "flow_grpo_sd3_8gpu")  # slow: see tests/unit/diffusion/test_diffusion_plan.py
MODELS = {"ddpo": "drawing_model", "vl": "counting_model", "glm4": "glm_model", "moonlight": "moonlight_model"}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes to the folder to which the recipes' paths are relative."""
    monkeypatch.chdir(ROOT)


def test_every_large_recipe_is_in_the_table() -> None:
    assert set(RECIPES) == {name for name in YAMLS if re.search(r"_[0-9]+gpu", name)}
    models = {path.name for path in (ROOT / "yaml_configs" / "models").iterdir()}
    assert {Path(recipe(name).model.path).name for name in RECIPES} <= models


@pytest.fixture(scope="module")
def sorting_model(tiny_models: TinyModels) -> Path:
    """Returns a model for the quickstarts, whose own model a tool makes."""
    return tiny_models("qwen2", weights=False)


@pytest.fixture(scope="module")
def glm_model(tiny_models: TinyModels) -> Path:
    return tiny_models("glm4_moe", weights=False)


@pytest.fixture(scope="module")
def moonlight_model(tiny_models: TinyModels) -> Path:
    return tiny_models("deepseek_v3", weights=False)


@pytest.fixture(scope="module")
def drawing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model for the diffusion quickstarts."""
    pytest.importorskip("diffusers", reason="pip install 'mrl[diffusion]'")
    return tiny_directory(tmp_path_factory.mktemp("drawing"))


@pytest.fixture(scope="module")
def counting_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model for the vision quickstarts."""
    return make_tiny_vl(tmp_path_factory.mktemp("counting"), "qwen3_vl", weights=False)


@pytest.mark.parametrize(
    ("name", "gpu"),  # test_a_recipe_fits covers the RECIPES on a GPU
    [
        pytest.param(name, gpu, marks=[pytest.mark.slow] * (name in DRAWING))
        for name in YAMLS
        for gpu in ("h100-80g", "none")
        if gpu == "none" or name not in RECIPES
    ],
)
def test_every_yaml_can_be_planned(
    name: str, gpu: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every YAML file can be planned as it is shipped, with and without GPUs."""
    own = MODELS.get(name.split("_")[1], "sorting_model")
    has_no_model = name.startswith(("quickstart", "grpo_smollm2"))  # a tool makes its model
    keys = [f"model.path={request.getfixturevalue(own)}"] if has_no_model else []
    keys += [f"teacher.path={request.getfixturevalue(own)}"] if name == "quickstart_distill" else []
    keys += ["rollout.sampling.max_new_tokens=256"] if "smollm2" in name else []  # limit of the tiny model's context
    assert main(["plan", f"yaml_configs/{name}.yaml", *keys, "--gpu", gpu]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("On CPUs: a node needs" if gpu == "none" else "The run fits: ")


def test_from_the_laptop_to_64_gpus_is_one_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From one laptop to 64 GPUs the configuration differs by one block, which docs/planning.md shows."""
    [block] = re.findall(r"```yaml\n(base: .*?)```", (ROOT / "docs" / "planning.md").read_text(), re.S)
    file = tmp_path / "mine.yaml"
    file.write_text(block.replace("base: ", f"base: {ROOT}/"))
    assert main(["plan", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "64 x h100-80g on 8 nodes of 8" in printed and "critic   TP8 x PP4 x DP2; 80 layers, 69.5B" in printed
    large = load(file, planned=machine_of)
    small = recipe("quickstart_ppo", f"model.path={large.model.path}")
    assert small.algorithm_used() == large.algorithm_used() and small.rewards() == large.rewards()


def test_engines_are_a_node_s_own() -> None:
    """The engines of each recipe equal `rollout.servers` of a real run on machines with eight GPUs."""
    for name, gpus in RECIPES.items():
        cfg, machine = recipe(name), machine_of(recipe(name))
        if (engines := cfg.engines()) is not None:
            assert machine.gpus == engines[0].servers * engines[0].tensor == min(8, gpus), name
    plan = plan_of("grpo_qwen32b_16gpu").engine
    assert plan is not None and plan.engines == 4 and [plan.at(rank) for rank in (0, 7, 8, 15)] == [0, 1, 2, 3]


def test_the_page_shows_the_ranks_of_the_largest_recipes() -> None:
    """docs/benchmarks/planning.md has the numbers of the largest recipes' ranks. tools/plan_table.py builds the models
    to compute them."""
    page = (ROOT / "docs" / "benchmarks" / "planning.md").read_text()
    for name in ("ppo_llama70b_64gpu", "ppo_llama70b_64gpu_16k"):
        for model in plan_of(name).work.models.values():
            kinds = Counter((coords.pp, elements_of_model(model, coords)) for coords in model.grid.all_coordinates)
            for (stage, own), ranks in kinds.items():
                row = f"| {name} | {model.name} | {stage} | {ranks} | {own.weights} | {own.buffer} |"
                assert row + (f" {own.shard} |" if model.is_trained else " - |") in page, (
                    "python -m tools.plan_table --write"
                )


JOBS = sorted(path.stem for path in (ROOT / "slurm").glob("*.sh") if "#SBATCH --signal" in path.read_text())
LEAVING_S = 60.0  # to end processes after the deadline, and to requeue the Slurm job


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in DRAWING)) for n in RECIPES])
def test_who_is_told_to_stop_has_time_to_save(name: str) -> None:
    """A run that is told to stop in a step has time to save, even if that takes half as long again as planned."""
    cfg = load(ROOT / f"yaml_configs/{name}.yaml", planned=machine_of)
    own = trainer_of(cfg).load_plan()
    if own is None:
        needed = plan_of(name).save_seconds
    else:
        plan = own(cfg, Cluster(CHIPS["h100-80g"], machine_of(cfg).world_size))
        needed = sum(part.seconds for part in plan.parts())  # diffusion checkpoints are small
    assert 0 < 1.5 * needed <= cfg.resilience.save_deadline_s


@pytest.mark.parametrize("job", JOBS)
def test_a_job_s_notice_is_longer_than_its_run_s_deadline(job: str) -> None:
    header = (ROOT / "slurm" / f"{job}.sh").read_text()
    [notice], [config] = re.findall(r"--signal=B:USR1@(\d+)", header), re.findall(r"{CONFIG:-(.*)}", header)
    tree, _ = read(ROOT / config)
    assert tree is not None
    said = ResilienceConfig.model_validate(tree.plain().get("resilience", {}))
    assert said.save_deadline_s + LEAVING_S <= float(notice)


@pytest.mark.parametrize(
    ("name", "gpus"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each[0] in DRAWING)) for each in RECIPES.items()],
)
def test_a_recipe_fits(name: str, gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"yaml_configs/{name}.yaml"]) == 0
    printed = capsys.readouterr().out
    apart = recipe(name).engine_nodes()
    train = gpus - (8 * apart.nodes if apart is not None else 0)
    assert f"{train} x h100-80g on {-(-train // 8)} node" in printed and "The run fits" in printed
    assert apart is None or f"{gpus - train} x h100-80g in addition to the trainer's" in printed
    assert "matmul_share" in printed, "what is assumed stands there"
