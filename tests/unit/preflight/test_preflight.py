"""`mrl preflight`: mistakes of every kind are found before a process group exists, and named with a remedy."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from mrl import cli, platform
from mrl.checkpoint import directory
from mrl.commands import shared
from mrl.config.checkpoint_size import checkpoint_bytes, disk_use, export_bytes
from mrl.config.derived import Machine
from mrl.config.loader import load
from mrl.config.schema import Config, RLConfig
from mrl.families import load_arch
from mrl.inference.launch import ServerSpec
from mrl.packages import pip_install, pip_install_extra
from mrl.plan.plan import machine_of
from mrl.ports import free_port
from mrl.preflight import checks, disk_space, machine, memory, versions
from tests.conftest import TinyModels
from tests.helpers.bad_runs import MISTAKES, Mistake, full, in_config_json, left_by_a_run, written
from tests.helpers.preflight_run import assert_named, preflight_run
from tests.helpers.sft_config import write
from tests.helpers.train_tools import ROOT, write_config
from tests.unit.evaluation.test_eval import sampling


@pytest.fixture
def run(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    return preflight_run(tiny_models("qwen2"), tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.id)
def test_a_seeded_mistake_is_named(mistake: Mistake, run: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    assert_named(mistake, *run(mistake))


def test_of_a_good_run_everything_is_ok(
    run: Callable[..., tuple[int, dict[str, Any]]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = run(Mistake("none", (), ("checkpoint.every_steps=1",)))
    found = {finding["check"]: finding for finding in said["findings"]}
    assert code == 0 and {finding["verdict"] for finding in said["findings"]} <= {"ok", "warning", "skipped"}, said
    assert set(found) >= {"configuration", "reward", "data", "tokenizer", "weights", "run directory", "disk", "ports"}
    assert not Path("runs").exists(), "a look leaves nothing behind"
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["preflight", "config.yaml", "data.prompt_key=question", "run.sed=3"]) == 2
    shown = capsys.readouterr().out
    assert "run.sed" in shown and "data.prompt_key" in shown and "versions" in shown and "2 problems" in shown


def test_where_others_would_meet_stops_nobody(run: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    code, said = run(Mistake("unused", (), environment={"MASTER_ADDR": "no.such.host.invalid"}))
    assert code == 0
    assert ["warning"] == [f["verdict"] for f in said["findings"] if "no.such.host.invalid" in f["text"]]


@pytest.mark.parametrize(
    ("half", "dtype", "warns"), [(22.0, "bfloat16", True), (80.0, "bfloat16", False), (22.0, "float32", False)]
)
def test_a_cpu_that_multiplies_bfloat16_slower_is_told(
    half: float,
    dtype: str,
    warns: bool,
    run: Callable[..., tuple[int, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "cpu_gflops", lambda kind: half if kind == torch.bfloat16 else 40.0)
    code, said = run(Mistake("dtype", (), (f"model.dtype={dtype}", "rollout.engine=transformers")))
    found = [each for each in said["findings"] if each["check"] == "dtype"]
    assert code == 0 and [each["verdict"] for each in found] == ["warning"] * warns
    assert not warns or "22 GFLOP/s in bfloat16 and 40 in float32" in found[0]["text"]


def test_several_things_are_wrong_at_once(run: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    """All mistakes are reported at once, those in files and those of the machine."""
    edits = (
        in_config_json(vocab_size=328),
        written("train.jsonl", '{"prompt": "a"}\n{"answer": "a"}\n'),
        left_by_a_run,
    )

    def edit(folder: Path, patch: dict[str, Any]) -> None:
        for each in edits:
            each(folder, patch)

    code, said = run(Mistake("several", (), (), edit, environment={"TMPDIR": "/nowhere"}))
    wrong = {finding["check"] for finding in said["findings"] if finding["verdict"] == "problem"}
    assert code == 1 and wrong >= {"weights", "data", "run directory", "temporary files"}


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    lines = (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines()
    asked = [Requirement(line) for line in lines if "==" in line]
    pinned = {each.name: str(each.specifier)[2:] for each in asked if each.marker is None or each.marker.evaluate()}
    assert {part: pinned[part] for part in versions.TESTED} == versions.TESTED


IN_A_WORLD = Machine(16, 8, 0, joined=True)
NEED_NOT_LOOK = [{"MRL_MEETING": "x"}, {"TORCHELASTIC_RESTART_COUNT": "1"}, {"LOCAL_RANK": "1"}]


@pytest.mark.parametrize("environment", NEED_NOT_LOOK)
def test_ranks_that_need_not_look_do_not(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", **environment}.items():
        monkeypatch.setenv(name, value)
    assert not shared.has_problems(None, IN_A_WORLD)  # type: ignore[arg-type]


def test_the_first_rank_of_another_node_looks_at_its_own_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setattr(checks, "RUN_CHECKS", (lambda cfg: 1 / 0,))
    monkeypatch.setattr(checks, "NODE_CHECKS", ())
    monkeypatch.setattr(checks, "MACHINE_CHECKS", (machine.check_temporary_files,))
    monkeypatch.setenv("TMPDIR", "/nowhere")
    cfg: Any = SimpleNamespace(is_language=True)
    assert shared.has_problems(cfg, IN_A_WORLD)
    assert capsys.readouterr().err.startswith(f"{socket.gethostname()}: TMPDIR is '/nowhere'")


def test_space_that_an_earlier_start_has_taken_counts(
    run: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The space of an earlier start's checkpoints counts as available, because the run replaces them."""
    older = Path("runs/run/checkpoints/step_1/actor")
    older.mkdir(parents=True)
    cfg = load("config.yaml", ["checkpoint.every_steps=1", "run.steps=9"])
    one = checkpoint_bytes(cfg, {"actor": load_arch("model")})
    full(one)(Path(), patch := {})
    for name, value in patch.items():
        monkeypatch.setattr(name, value)
    [finding] = disk_space.check_space(cfg)
    assert finding.verdict == "problem"
    (older / "data").write_bytes(bytes(2 * one))
    [finding] = disk_space.check_space(cfg)
    assert finding.verdict == "ok"
    [finding] = disk_space.check_space(
        load("config.yaml", ["checkpoint.every_steps=1", "checkpoint.keep_every_steps=1", "run.steps=9"])
    )
    assert finding.verdict == "warning" and "fills up before the run ends" in finding.text


@pytest.mark.parametrize(
    ("steps", "every", "keep_last", "keep_every"), [(1000, 10, 5, 100), (95, 10, 1, 20), (9, 1, 2, 1), (30, 10, 5, 10)]
)
def test_the_room_for_checkpoints_is_the_most_that_are_there_at_once(
    run: Callable[..., tuple[int, dict[str, Any]]],
    tmp_path: Path,
    steps: int,
    every: int,
    keep_last: int,
    keep_every: int,
) -> None:
    words = [f"run.steps={steps}", f"checkpoint.every_steps={every}", f"checkpoint.keep_last={keep_last}"]
    cfg = load("config.yaml", [*words, f"checkpoint.keep_every_steps={keep_every}"])
    most = 0
    for step in sorted({*range(every, steps + 1, every), steps}):
        final = directory.step_path(tmp_path, step)
        final.mkdir(parents=True)
        (final / "complete").touch()
        most = max(most, len(list(final.parent.iterdir())))
        directory.prune(final.parent, keep_last, keep_every, final)
    archs = {"actor": load_arch("model")}
    found = disk_use(cfg, archs)
    assert found.turning + found.staying == most * checkpoint_bytes(cfg, archs)


def test_room_where_the_data_says_how_long_the_run_is_and_for_an_average(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    model = tiny_models("llama")
    archs, words = {"actor": load_arch(str(model))}, ["checkpoint.every_steps=500", "checkpoint.export_hf=true"]
    sft = load(write(tmp_path, model), ["batch.epochs=90", "run.steps=100", "validation.keep_best=false", *words])
    assert disk_use(sft, archs).turning == 2 * checkpoint_bytes(sft, archs)
    rl = load(sampling(tmp_path, model, ema={"decay": 0.9}), words)
    assert disk_use(rl, archs).staying == 2 * export_bytes(rl, archs)


def test_room_of_several_adapters_is_that_of_each_of_them(tiny_models: TinyModels, tmp_path: Path) -> None:
    model = tiny_models("llama")
    archs, words = {"actor": load_arch(str(model))}, ["checkpoint.every_steps=5", "checkpoint.export_hf=true"]
    sections: dict[str, Any] = {"adapters": {"a": {}, "b": {"lora": {"rank": 2, "targets": ["q_proj"]}}}}
    sections |= {"sync": {"lora": "adapter"}, "actor": {"lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}}}
    both = load(write_config(tmp_path, model, **sections), words)
    assert isinstance(both, RLConfig)
    a, b = (disk_use(own, archs) for own in both.adapter_configs().values())
    used, whole = disk_use(both, archs), export_bytes(both, archs)
    assert used.turning == a.turning + b.turning and a.turning > 4 * b.turning > 0
    assert used.staying == a.staying + b.staying - 2 * whole, "no weights are merged"


def test_a_command_that_installs_names_this_python() -> None:
    assert pip_install("a>=1") == f"{sys.executable} -m pip install 'a>=1'"
    assert "nvidia-resiliency-ext" in pip_install_extra("resilience")


@pytest.mark.parametrize(("name", "capability", "fits"), [("NVIDIA B200", (10, 0), True), ("L40", (8, 9), False)])
def test_a_recipe_is_held_against_the_gpus_that_are_here(
    name: str, capability: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = platform.GpuHealth(0, name, 179 << 30, 179 << 30, capability)
    monkeypatch.setattr(platform, "gpu_health", lambda: [gpu])
    monkeypatch.setattr(platform, "transformer_engine_usable", lambda: True)
    cfg = load(ROOT / "yaml_configs/grpo_qwen0.6b_1gpu.yaml", ["actor.precision.fp8.recipe=mxfp8"], planned=machine_of)
    assert isinstance(cfg, Config)
    found = [each for each in memory.check_memory(cfg, machine_of(cfg)) if each.check == "GPU memory"]
    assert [each.verdict for each in found] == ["ok" if fits else "problem"]
    assert fits or f"mxfp8 needs compute capability 10.0 or above and below 12.0, and {name} has 8.9" in found[0].text


def test_an_all_reduce_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`--network` measures an all-reduce in a world of one; tests/system/launcher/test_ranks.py has several ranks."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    try:
        assert cli.main(["preflight", "none.yaml", "--network", "--mib", "1"]) == 0
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert "all-reduce of 1 MiB over 1 ranks on 1 node by gloo: 0.00 GB/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("preflight", "none.yaml", "--mib", "1"), "--mib needs --network or --nodes"),
        (("preflight", "none.yaml", "--at-least", "1"), "--at-least needs --network or --nodes"),
        (("preflight", "none.yaml", "--names", "a,b"), "--names needs --nodes"),
        (("preflight", "none.yaml", "--wait-s", "3"), "--wait-s needs --nodes"),
        (("preflight", "none.yaml", "--network", "--ranks", "4"), "--ranks does not go with --network"),
        (("preflight", "none.yaml", "--network", "--nodes", "2"), "--nodes does not go with --network"),
        (("report", ".", "--every-s", "3"), "--every-s needs --follow"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_an_engine_over_nodes_is_looked_at_as_this_node_s_part(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[ServerSpec] = []
    monkeypatch.setattr(machine, "launcher", lambda name: specs.append)
    monkeypatch.setattr(machine.platform, "gpu_count", lambda: 8)
    cfg = load(write_config(tmp_path, tiny_models("llama")))
    spanning = cfg.model_copy(
        update={
            "rollout": cfg.rollout.model_copy(update={"tensor": 16}),
            "placement": cfg.placement.model_copy(update={"nodes_per_engine": 2}),
        }
    )
    assert [finding.verdict for finding in machine.check_packages(spanning)] == ["ok"]
    assert specs[0].environment()["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


def test_a_teacher_s_engine_must_listen(tiny_models: TinyModels, tmp_path: Path) -> None:
    path, url = str(tiny_models("llama")), f"http://127.0.0.1:{free_port()}"
    cfg = load(write_config(tmp_path, tiny_models("llama"), teacher={"path": path, "url": url}))
    (found,) = machine.check_services(cfg)
    assert found.verdict == "problem"
    assert str(found).startswith(f"teacher.url: nothing answers at 127.0.0.1 port {url.rpartition(':')[2]}")


def test_engines_of_other_nodes_need_nothing_here(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "launcher", lambda name: pytest.fail("no engine is started here"))
    placement = {"mode": "disaggregated", "nodes": 3, "wait_s": 60.0}
    cfg = load(write_config(tmp_path, tiny_models("llama"), placement=placement))
    assert [finding.verdict for finding in machine.check_packages(cfg)] == ["ok"]
    (found,) = machine.check_services(cfg)
    assert str(found) == "the run waits up to 60 s for 3 engine nodes (mrl serve)"
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == "sglang_router" else find_spec(name))
    (found,) = machine.check_packages(cfg)
    assert found.verdict == "problem"
    assert re.search(r"disaggregated needs sglang-router, .* -m pip install sglang-router==\S+$", str(found))
