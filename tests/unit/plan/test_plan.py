"""`mrl plan`: the shipped recipes, placement against Megatron's groups, and batches against the real planner."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch.distributed as dist
import yaml

from mrl import platform

platform.install()

from mrl.cli import main  # noqa: E402
from mrl.config.derived import Machine  # noqa: E402
from mrl.config.loader import load  # noqa: E402
from mrl.config.schema import ParallelConfig, RLConfig, TrainConfig  # noqa: E402
from mrl.config.trainers.base import Config, StepSize  # noqa: E402
from mrl.data.balance import plan_micro_batches  # noqa: E402
from mrl.families import ModelArch, load_arch  # noqa: E402
from mrl.inference.routed import RoutedShape  # noqa: E402
from mrl.parallel import Mesh  # noqa: E402
from mrl.plan import memory, text  # noqa: E402
from mrl.plan.chips import CHIPS, NO_GPU, Assumptions, Cluster  # noqa: E402
from mrl.plan.engine import weights_per_gpu  # noqa: E402
from mrl.plan.grid import Grid  # noqa: E402
from mrl.plan.memory import NEEDS  # noqa: E402
from mrl.plan.placement import Placement  # noqa: E402
from mrl.plan.plan import Plan, machine_of, make_plan, read_shapes  # noqa: E402
from mrl.plan.workload import MicroBatchPlan, SampleLengths, largest_micro_batch  # noqa: E402
from mrl.trainers.rl.memory_order import ORDER  # noqa: E402
from tests.conftest import TinyModels  # noqa: E402

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes to the folder to which the recipes' paths are relative."""
    monkeypatch.chdir(ROOT)


def recipe(name: str, *overrides: str) -> Config:
    return load(f"yaml_configs/{name}.yaml", overrides, planned=machine_of)


def plan_of(name: str, *overrides: str, gpu: str = "h100-80g") -> Plan:
    cfg = recipe(name, *overrides)
    cluster = Cluster(CHIPS[gpu], machine_of(cfg).world_size)
    return make_plan(cfg, cluster, read_shapes(cfg), Assumptions())


@pytest.mark.parametrize(
    ("name", "driver", "head"),
    [
        ("quickstart_gpu", "", "planned for none: this machine has no GPU"),
        ("ppo_llama70b_64gpu", "", "planned for h100-80g: there is no GPU here"),
        ("grpo_qwen0.6b_1gpu", "NVIDIA H200", "planned for h200: this machine's GPU"),
        ("grpo_qwen0.6b_1gpu", "NVIDIA X9", "planned for h100-80g: mrl does not know the limits of NVIDIA X9"),
    ],
)
def test_a_plan_is_for_this_machine(
    name: str,
    driver: str,
    head: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("mrl.commands.plan.DRIVER", tmp_path)
    if driver:
        card = tmp_path / "gpus" / "0000:01:00.0"
        card.mkdir(parents=True)
        (card / "information").write_text(f"Model: \t\t {driver}\nIRQ:   \t\t 47\n")
    tiny = ["model.path=yaml_configs/models/sort-20m"] if name == "quickstart_gpu" else []
    main(["plan", f"yaml_configs/{name}.yaml", *tiny])
    assert capsys.readouterr().out.startswith(head)


def test_caches_of_engines_on_cpus_are_in_the_plan() -> None:
    def of_node(*keys: str) -> float:
        cfg = recipe("quickstart_real", "model.path=yaml_configs/models/Qwen3-0.6B", *keys)
        machine = machine_of(cfg)
        plan = make_plan(
            cfg, Cluster(NO_GPU, machine.world_size, machine.local_world_size), read_shapes(cfg), Assumptions()
        )
        assert plan.engine is not None and plan.engine.holds >= plan.engine.wanted
        return plan.host_of_node

    a_token = 28 * 8 * 128 * 2 * 4  # layers, heads, keys and values, float32
    more = of_node("rollout.concurrent_requests=128") - of_node("rollout.concurrent_requests=64")
    assert more == 64 * 88 * a_token


def test_what_does_not_fit_is_said_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["actor.offload=none", "critic.offload=none", "ref.offload=none"]
    assert main(["plan", "yaml_configs/ppo_llama70b_64gpu.yaml", *keys, "--gpu", "a100-40g"]) == 1
    printed = capsys.readouterr().out
    assert "The run does not fit" in printed and "rank 0 needs" in printed and "actor optimizer" in printed


def test_a_run_that_could_not_save_when_it_is_told_to_stop_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["plan", "yaml_configs/grpo_qwen32b_16gpu.yaml"]
    assert main([*recipe, "resilience.save_deadline_s=500.0"]) == 0
    said = capsys.readouterr().out
    assert "may need 527 s" in said and "resilience.save_deadline_s is 500 s: raise it" in said
    for enough in ("resilience.save_deadline_s=530.0", "--gpu=none"):
        assert main([*recipe, enough]) == 0
        assert "save_deadline_s" not in capsys.readouterr().out


def test_a_chip_without_the_recipe_is_said_with_both_numbers() -> None:
    said = plan_of("ppo_llama70b_64gpu_fp8", gpu="a100-80g").problems
    wanted = "precision.fp8.recipe: blockwise needs compute capability 9.0 or above, and a100-80g has 8.0"
    assert any(text.startswith(wanted) for text in said)
    assert not plan_of("ppo_llama70b_64gpu_fp8").problems


def test_more_memory_and_a_faster_chip_help() -> None:
    h100, b200 = (plan_of("ppo_llama70b_64gpu", gpu=gpu) for gpu in ("h100-80g", "b200"))
    assert b200.seconds < h100.seconds
    assert h100.engine is not None and b200.engine is not None
    assert b200.engine.cache_tokens > 2 * h100.engine.cache_tokens


def test_offload_takes_a_model_away_while_another_computes() -> None:
    def owners(*overrides: str) -> dict[str, set[str]]:
        phases = plan_of("ppo_llama70b_64gpu", *overrides).worst
        return {name: {i.owner for i in phase.items if i.nbytes} for name, (_, phase) in phases.items()}

    away, stays = owners(), owners("actor.offload=none")
    assert "actor" not in away["rollout"] | away["critic_update"]
    assert {"actor"} < stays["rollout"] and "actor" in stays["critic_update"]
    assert {"actor", "critic", "ref"} < away["experience"]


def test_routing_replay_keeps_the_experts_of_every_token() -> None:
    """Routing replay stores the experts of every token. Qwen3-30B-A3B has 8 of 128 in each of 48 layers; with 600
    experts a number would take two bytes."""

    def items(mode: str) -> dict[str, float]:
        keys = f"actor.routing_replay={mode}", "batch.samples_per_minibatch=256"
        plan = plan_of("grpo_qwen3_30b_a3b_32gpu", *keys)
        all_of = {name: phase.items for name, (_, phase) in plan.worst.items()} | {"host": plan.host(0)}
        all_of |= {f"host of rank {rank}": plan.host(rank) for rank in (1, 2)}
        return {f"{name} {i.what}": i.nbytes for name, some in all_of.items() for i in some if i.owner != "process"}

    off, engine, trainer = map(items, ("off", "engine", "trainer"))
    work = plan_of("grpo_qwen3_30b_a3b_32gpu").work
    arch, tokens = work.models["actor"].arch, work.size.learnt * work.lengths.mean
    made = RoutedShape.of(arch).read({"routed_experts": coded(arch, 5)}, 5)
    assert made.nbytes / 5 == arch.choice_bytes == 48 * 8
    assert arch.experts is not None
    assert replace(arch, experts=replace(arch.experts, count=600)).choice_bytes == 2 * 48 * 8
    kept, said, update = "host routed experts", "host objects of rank 0", "actor_update routed experts"
    assert not any("routed experts" in name for name in off)
    model = work.models["actor"]
    share = tokens * 48 * 8 / (model.grid.dp * model.layout.context * model.layout.pipeline)
    assert engine[kept] == trainer[kept] == tokens * 48 * 8 + share, "rank 0 has all, and its own share"
    assert engine["host of rank 2 routed experts"] == share < tokens * 48 * 8 / 4
    assert model.layout.tensor == 2 and "host of rank 1 routed experts" not in engine, "its neighbour has them"
    assert engine[said] - off[said] > tokens * 48 * 8 * 6, "and the answers that they are read from"
    assert trainer[said] == off[said] and trainer[update] == engine[update] > 0
    passes = [found["experience routed experts"] for found in (engine, trainer)]
    assert passes[1] - passes[0] == pytest.approx(share)


def coded(arch: ModelArch, tokens: int) -> str:
    chosen = np.broadcast_to(np.arange(8), (tokens - 1, 48, 8))
    return RoutedShape.of(arch).written(chosen)


def test_engines_apart_share_no_memory() -> None:
    """Separate engines share no memory with the trainer: on their own GPUs, or at unknown addresses."""
    together, gpus = plan_of("dapo_qwen7b_8gpu"), ",".join(map(str, range(8, 16)))
    apart = plan_of("dapo_qwen7b_8gpu", f"rollout.gpus=[{gpus}]", "rollout.release=none")
    assert together.engine is not None and apart.engine is not None
    assert apart.engine.cache > together.engine.cache
    owners = {item.owner for _, phase in apart.worst.values() for item in phase.items}
    assert "engine" not in owners and apart.engine.at(3) is None and apart.engine.at(9) == 1
    keys = ["rollout.urls=[http://a:1]", "rollout.servers=1", "rollout.memory_fraction=0.7"]
    elsewhere = plan_of("dapo_qwen7b_8gpu", *keys, "rollout.release=none")
    assert elsewhere.engine is None and {part.phase for part in elsewhere.parts} & {"rollout", "sync"} == {"sync"}


def test_an_engine_larger_than_a_node_is_on_several_and_talks_over_the_network() -> None:
    whole = plan_of("ppo_llama70b_64gpu")
    spread = plan_of("ppo_llama70b_64gpu", "rollout.tensor=16", "placement.nodes_per_engine=2")
    assert whole.engine is not None and spread.engine is not None
    assert (whole.engine.engines, spread.engine.engines) == (8, 4)
    assert [spread.engine.at(rank) for rank in (0, 15, 16, 63)] == [0, 0, 1, 3]
    assert spread.engine.weights < 0.6 * whole.engine.weights
    limits = [{part.limit for part in plan.parts if part.phase == "rollout"} for plan in (whole, spread)]
    assert "network" in limits[1] - limits[0]
    placed = Placement.of(spread.cfg, {}, Machine(64, 8, gpus=8, joined=True))
    assert placed.engine_of == spread.placement.engine_of and not placed.beside
    idle = Placement.of(spread.cfg, {}, Machine(64, 8, gpus=0, joined=True))
    assert idle.beside == {node: (node // 2,) for node in range(8)}


def test_the_plan_and_the_trainer_move_memory_alike() -> None:
    assert NEEDS.keys() - ORDER.keys() == {"checkpoint"}
    for phase, (levels, (weights, cache)) in ((name, NEEDS[name]) for name in NEEDS if name in ORDER):
        needs = ORDER[phase]
        assert {name: level for name, level in needs.models.items() if level != "nothing"} == levels, phase
        if needs.engine is not None:
            assert ("weights" in needs.engine, "kv_cache" in needs.engine) == (weights, cache), phase


def test_a_teacher_has_a_phase_and_a_head_beside_the_actor_s() -> None:
    """A teacher has its own phase, and its head is next to the actor's in the update. Qwen3-32B teaches a copy of
    itself, whose weights are offloaded in all other phases."""

    def items(*overrides: str) -> dict[str, dict[str, float]]:
        plan = plan_of("grpo_qwen32b_16gpu", *overrides)
        assert plan.problems or plan.seconds
        of_phase = {name: phase.items for name, (_, phase) in plan.worst.items()}
        last = {f"host {i.owner} {i.what}": i.nbytes for rank in plan.ranks for i in plan.host(rank)}
        found = {name: {f"{i.owner} {i.what}": i.nbytes for i in some} for name, some in of_phase.items()}
        return found | {"host": last, "seconds": {part.what: part.seconds for part in plan.parts}}

    path = "yaml_configs/models/Qwen3-32B"
    without = items()
    whole, sampled = (
        items(f"teacher={{path: {path}, offload: all, divergence: {kind}}}") for kind in ("jsd", "sampled")
    )
    served = items(f"teacher={{path: {path}, url: 'http://t:1', top_k: 16}}", "rollout.sampling.temperature=1.0")
    for found in (whole, sampled):
        assert found["teacher"]["teacher weights"] > 1e9 and "actor optimizer" not in found["teacher"]
        assert "teacher weights" not in found["actor_update"] | found["experience"]
        assert "host teacher offloaded weights" in found["host"]
    update, width = whole["actor_update"], 5120
    columns = 151936 / 8
    assert update["teacher head beside the actor's"] > columns * width * 2, "its lm_head stays for the updates"
    assert update["actor head of the divergence"] > columns * width * 2, "gradients of a second pass"
    work = plan_of("grpo_qwen32b_16gpu").work
    tokens = work.size.learnt * work.lengths.response
    assert whole["host"]["host teacher hidden states"] == tokens / work.models["actor"].grid.dp * width * 2
    assert whole["seconds"]["divergence to the teachers"] > 0
    assert sampled["actor_update"] == without["actor_update"] and "divergence to the teachers" not in sampled["seconds"]
    assert "host teacher hidden states" not in sampled["host"] and "teacher" not in served and "teacher" not in without
    assert served["host"]["host samples teachers' top tokens"] == tokens * 16 * 8
    assert served["actor_update"]["actor head of the divergence"] == update["actor head of the divergence"]


def test_all_adapters_of_a_run_are_counted_and_their_base_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its own rank, targets and batch."""
    batch = "adapters.code.batch={prompts_per_step: 16, samples_per_prompt: 4}"
    words = ("adapters.code.lora={rank: 8, targets: [q_proj, o_proj]}", batch)
    both = plan_of("grpo_adapters_qwen7b_1gpu", *words)
    each = {
        name: make_plan(own, both.cluster, read_shapes(own), Assumptions())
        for name, own in both.cfg.adapter_configs().items()
    }

    def actor(plan: Plan, phase: str, what: str) -> float:
        return sum(i.nbytes for i in plan.worst[phase][1].items if (i.owner, i.what) == ("actor", what))

    for what in ("gradients", "optimizer"):
        assert [actor(both, phase, what) for phase in both.worst] == [
            sum(actor(plan, phase, what) for plan in each.values()) for phase in both.worst
        ]
    own = {name: plan.work.models["actor"] for name, plan in each.items()}
    held = {name: memory.elements_of_model(model, model.grid.coordinates(0)) for name, model in own.items()}
    assert held["math"].frozen == held["code"].frozen > 20 * held["math"].buffer > 40 * held["code"].buffer
    whole = held["math"].frozen + held["math"].buffer + held["code"].buffer
    assert actor(both, "rollout", "weights") == 2 * whole
    assert actor(both, "actor_update", "activations") == max(
        actor(p, "actor_update", "activations") for p in each.values()
    )
    assert both.checkpoint_bytes == sum(plan.checkpoint_bytes for plan in each.values())
    assert both.host(0)[0].nbytes == sum(plan.host(0)[0].nbytes for plan in each.values())
    spent = text.phase_seconds(both)
    for phase in ("experience", "actor_update"):
        assert spent[phase] == pytest.approx(sum(text.phase_seconds(plan)[phase] for plan in each.values()))
    assert both.work.size.sampled == 32 * 8 + 16 * 4 and both.work.lengths.longest == 512 + 2048
    room = [plan.engine.weights for plan in (both, each["math"]) if plan.engine is not None]
    assert room[0] - room[1] == 16 * held["math"].buffer / 16 * 2, "three adapters of the larger rank, not two"
    assert main(["train", "--dry-run", "yaml_configs/grpo_adapters_qwen7b_1gpu.yaml", *words]) in (0, 1)
    said = capsys.readouterr().out
    assert ": as planned" in said and "NOT as planned" not in said and "code: actor: 64 samples of 2 to" in said


def test_deltas_pay_below_a_share_of_changed_elements(capsys: pytest.CaptureFixture[str]) -> None:
    """Deltas pay below a share of changed elements. In bfloat16 a changed element takes 3 bytes instead of 2, and 255
    unchanged ones take 1."""
    keys = ("sync.transport=distributed", "sync.delta={}")
    plans = [plan_of("grpo_qwen32b_disaggregated", *keys, gpu=gpu) for gpu in ("h100-80g", "a100-80g")]
    assert plan_of("grpo_qwen32b_disaggregated").delta_break_even is None
    for plan in plans:
        found = plan.delta_break_even
        assert found is not None and found.smaller_below == pytest.approx((2 - 1 / 255) / 3)
        engines = plan.engine.engines if plan.engine is not None else 0
        share = 0.5 * found.faster_below if found.faster_below else 0.01
        for changed, is_faster in ((share, found.faster_below), (1.1 * share + 0.5, 0)):
            nbytes, chip = 1e9, plan.cluster.chip
            wait = 2 * nbytes / (chip.pcie * 0.75)
            delta = wait + engines * nbytes * (changed * 1.5 + 1 / 510) / found.speed
            assert (delta < engines * nbytes / found.speed) == bool(is_faster)
    assert main(["plan", "yaml_configs/grpo_qwen32b_disaggregated.yaml", *keys]) == 0
    printed = capsys.readouterr().out
    assert "Delta weight sync" in printed and "if less than 67% of the elements change" in printed
    assert main(["plan", "yaml_configs/grpo_qwen32b_disaggregated.yaml", *keys, "--gpu", "none"]) == 0
    assert "if less than 67% of the elements change" in capsys.readouterr().out


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "pipeline": 2, "context": 2},
        {"tensor": 2, "expert": 4},
        {"context": 2, "expert": 2, "pipeline": 2},
        {"tensor": 4, "expert": 2, "expert_tensor": 2},
    ],
)
def test_ranks_sit_where_megatron_puts_them(layout: dict[str, int]) -> None:
    world = 16
    grid = Grid(ParallelConfig(**layout), world)
    for rank in range(world):
        with platform.fake_rank(rank, world):
            mesh, coords = Mesh(grid.layout), grid.coordinates(rank)
            assert (mesh.tp_rank, mesh.pp_rank, mesh.cp_rank, mesh.dp_rank) == (
                coords.tp,
                coords.pp,
                coords.cp,
                coords.dp,
            )
            assert (mesh.ep_rank, mesh.etp_rank, mesh.edp_rank) == (coords.ep, coords.etp, coords.edp)
            for axis in ("tp", "pp", "cp", "dp", "ep"):
                (mine,) = [ranks for ranks in grid.groups(axis) if rank in ranks]
                assert sorted(dist.get_process_group_ranks(vars(mesh)[f"{axis}_group"])) == list(mine), axis


@pytest.mark.parametrize("length", [100, 512, 1000, 4097])
@pytest.mark.parametrize("layout", [{}, {"context": 2}, {"pipeline": 2, "virtual_pipeline": 2}])
def test_micro_batches_are_those_of_the_real_planner(layout: dict[str, int], length: int) -> None:
    p, samples = ParallelConfig(**layout), 96
    grid = Grid(p, 8)
    model: Any = SimpleNamespace(
        name="actor", layout=p, grid=grid, train=TrainConfig(parallel=p, max_tokens_per_microbatch=4096)
    )
    align = 2 * p.context if p.context > 1 else 1
    multiple = p.pipeline if p.virtual_pipeline else 1
    real = plan_micro_batches([length] * samples, grid.dp, 4096, align, multiple_of=multiple)
    assert MicroBatchPlan.of(model, samples, length).count == len(real[0])


def test_an_engine_s_weights_are_the_model_s() -> None:
    arch = load_arch("yaml_configs/models/Llama-3.1-70B")
    assert weights_per_gpu(arch, 1, 2) == 2 * 70_553_706_496  # as the hub reports it for the model
    assert weights_per_gpu(arch, 8, 2) == pytest.approx(2 * 70_553_706_496 / 8, rel=1e-3)


def test_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "ranks.svg"
    assert main(["plan", "yaml_configs/grpo_qwen32b_16gpu.yaml", "--json", "--svg", str(picture)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] and data["gpus"] == 16 and len(data["ranks"]) == 16
    assert data["ranks"][9] == {
        "rank": 9, "node": 1, "engine": 2,
        "actor": {"tp": 1, "cp": 0, "dp": 1, "pp": 0, "etp": 1, "ep": 0, "edp": 1},
    }  # fmt: skip
    assert data["seconds"] == pytest.approx(sum(part["seconds"] for part in data["parts"]))
    for phase in data["memory"].values():
        assert phase["bytes"] == pytest.approx(sum(item["nbytes"] for item in phase["items"])) and phase["bytes"] > 0
    words = "".join(ElementTree.parse(picture).getroot().itertext())
    assert "rank 15" in words and "engine 3" in words and "node 1" in words


def test_search_writes_a_configuration_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.yaml"
    arguments = ["plan", "yaml_configs/dapo_qwen7b_8gpu.yaml", "--gpus", "16", "--gpu", "h200"]
    assert main([*arguments, "--search", "--out", str(out)]) == 0
    table = capsys.readouterr().out.splitlines()
    seconds = [float(line.split(" s ")[0].split()[-1]) for line in table[1:] if " s " in line and "GiB  " in line]
    assert len(seconds) > 3 and all(after > 0.98 * before for before, after in pairwise(seconds))
    assert main(["plan", str(out), "--gpu", "h200"]) == 0
    printed = capsys.readouterr().out
    assert "16 x h200 on 2 nodes" in printed and f" about {seconds[0]:.0f} s" in printed


def test_search_writes_the_plan_that_it_has_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A search writes the plan that it printed. No layout of CONFIG reappears, and KEY=VALUE arguments stay."""
    config, out = tmp_path / "own.yaml", tmp_path / "found.yaml"
    own: dict[str, Any] = {
        "base": str(ROOT / "yaml_configs/grpo_qwen0.6b_1gpu.yaml"),
        "run": {"nproc": 4},
        "algorithm": {"kl": {"use_in_loss": True, "coef": 0.01}},
        "actor": {"parallel": {"pipeline": 4, "virtual_pipeline": 7, "sequence": False}},
        "ref": {"parallel": {"tensor": 2}},
    }
    config.write_text(yaml.safe_dump(own))
    search = ["plan", str(config), "--gpus", "4", "batch.prompts_per_step=128", "--search", "--out", str(out)]
    assert main(search) == 0
    best = capsys.readouterr().out.splitlines()[1]
    found = load(out, planned=machine_of)
    assert isinstance(found, RLConfig) and found.batch.prompts_per_step == 128
    layout = found.actor.parallel
    assert layout.virtual_pipeline is None and layout.sequence and found.ref.parallel is None
    assert main(["plan", str(out)]) == 0
    assert f" about {float(best.split(' s ')[0].split()[-1]):.0f} s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(
            ["ppo_llama70b_64gpu", "--gpus", "8"],
            "TP8, 5120 tokens, recompute full: needs ",
            marks=pytest.mark.slow,
        ),
        (["dapo_qwen7b_8gpu", "--gpus", "1"], "refused, for example: rollout.servers: 8 servers x tensor 1 = 8 GPUs"),
    ],
)
def test_a_search_without_a_result_says_why(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search without a result says why, even if the configuration's own layout does not fit that number of GPUs."""
    name, *options = arguments
    assert main(["plan", f"yaml_configs/{name}.yaml", "--search", *options]) == 1
    assert said in capsys.readouterr().out


def test_engines_that_keep_their_memory_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Engines that keep their memory are named as the cause: the two models take turns, and whether they fit depends on
    the engines' share."""
    assert main(["plan", "yaml_configs/ppo_llama70b_64gpu.yaml", "rollout.release=none"]) == 1
    assert "actor_update: rank 0 needs 125.0 GiB, its GPU has 80.0" in (printed := capsys.readouterr().out)
    assert "-> rollout.release: all (the engine holds 68.0 GiB meanwhile)" in printed
    assert (
        main(["plan", "yaml_configs/ppo_llama70b_64gpu.yaml", "rollout.release=none", "rollout.memory_fraction=0.26"])
        == 0
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "h900"], "expected one of a100-80g"),
        (["--gpus", "12"], "do not divide"),
        (["--gpus", "0"], "at least 1"),
        (["--gpus", "160", "--per-node", "64"], "not a multiple of 64"),
        (["--search", "--gpu", "none"], "predicted for GPUs only"),
        (["--search", "--json"], "do not go with --search"),
        (
            ["critic=null", "algorithm.adv_estimator=grpo", "batch.samples_per_prompt=8", "rollout.release=none"],
            "keep it",
        ),
        (["--out", "x.yaml"], "--out needs --search"),
        (["--search", "--out", "yaml_configs/ppo_llama70b_64gpu.yaml"], "would overwrite CONFIG"),
        (["actor.parallel.tensor=3"], "does not divide the model's"),
        (["model.path=nowhere"], "nowhere/config.json does not exist"),
    ],
)
def test_mistakes_are_said_at_once(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "yaml_configs/ppo_llama70b_64gpu.yaml", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "yaml_configs/ppo_llama70b_64gpu.yaml", "--svg", "/nowhere/x.svg"]) == 1
    assert capsys.readouterr().err == "mrl: /nowhere/x.svg cannot be written: No such file or directory\n"


def test_prompts_that_are_here_give_their_mean_length(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": digits, "answer": ""} for digits in ("31542=", "3154231542=")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ["data.max_prompt_tokens=16", f"model.path={tiny_models('llama')}"]
    asked = ["plan", "yaml_configs/quickstart_grpo.yaml", *keys, "actor.parallel.context=1", "run.nproc=1"]
    asked += ["--gpu", "h200"]
    assert main([*asked, f"data.train={tmp_path / 'train.jsonl'}"]) == 0
    printed = capsys.readouterr().out
    assert "prompts of data.train: mean 8 tokens, longest 11" in printed and "assumed mean 8 + 4" in printed
    assert "mean_response_share" in printed and "mean_prompt_share" not in printed, "which is measured"
    assert main([*asked, f"data.train={tmp_path / 'absent.jsonl'}"]) == 0
    printed = capsys.readouterr().out
    assert "prompts of data.train" not in printed and "mean_prompt_share" in printed


def test_dry_run_builds_every_kind_of_rank_and_names_what_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "yaml_configs/ppo_llama70b_64gpu_fp8.yaml", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("as planned") == 12, "four stages of actor, critic and reference"
    assert "NOT" not in printed and "The run fits" in printed
    assert "missing: data.train: 'data/train.parquet'" in printed and "no safetensors" in printed


def test_dry_run_is_of_the_gpus_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    blackwell = ["yaml_configs/grpo_qwen0.6b_1gpu.yaml", "actor.precision.fp8.recipe=mxfp8"]
    assert main(["train", *blackwell, "--dry-run"]) == 1
    assert "mxfp8 needs compute capability 10.0" in capsys.readouterr().out
    assert main(["train", *blackwell, "--dry-run", "--gpu", "b200"]) == 0
    assert "Memory per b200" in capsys.readouterr().out
    for wrong, said in (
        (["--gpu", "b200"], "--gpu needs --dry-run"),
        (["--dry-run", "--gpu", "h900"], "--gpu h900: expected one of a100-80g"),
        (["--dry-run", "--nodes=2", "--node=0", "--head=a:1"], "leave out --nodes, --node and --head"),
    ):
        assert main(["train", *blackwell, *wrong]) == 2 and said in capsys.readouterr().err


def test_engines_on_nodes_of_their_own_are_counted_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """Engines on their own nodes are planned separately. They need nothing of the trainer's GPUs, and each gets its
    weights by its own broadcast."""
    shared, apart = plan_of("grpo_qwen32b_16gpu"), plan_of("grpo_qwen32b_disaggregated")
    assert apart.engine is not None and apart.engine.gpus == () and apart.engine.engines == 4
    assert not any(item.owner == "engine" for _, phase in apart.worst.values() for item in phase.items)
    pushes = [[part.seconds for part in p.parts if part.what == "weights to the engines"] for p in (shared, apart)]
    assert sum(pushes[1]) == pytest.approx(4 * sum(pushes[0]))
    assert main(["plan", "yaml_configs/grpo_qwen32b_disaggregated.yaml"]) == 0
    assert "4 x TP4, on 2 separate nodes (mrl serve): 16 x h100-80g" in capsys.readouterr().out
    (problem,) = plan_of("grpo_qwen32b_disaggregated", "rollout.servers=4").problems
    beside = plan_of("grpo_async_qwen32b_disaggregated")
    sampling = sum(part.seconds for part in apart.parts if part.phase == "rollout")
    learning = sum(part.seconds for part in apart.parts if part.phase in ("experience", "actor_update"))
    assert beside.seconds == pytest.approx(apart.seconds - min(sampling, learning)), "the shorter one is hidden"
    assert "the engines of a node need 16 GPUs, and a node has 8" in problem


def test_a_micro_batch_of_all_samples_has_each_prompt_once() -> None:
    """A micro-batch of all samples stores each prompt once: two replicas of 32 samples in groups of 8, prompts of 64
    tokens and responses of 24."""
    model = SimpleNamespace(
        train=TrainConfig(), grid=SimpleNamespace(dp=2), layout=ParallelConfig(), arch=SimpleNamespace(vision=None)
    )
    lengths = SampleLengths(88, 12.0, 49.0)
    size = StepSize(learnt=64, minibatch=64, group=8, prompt_tokens=64, response_tokens=24)

    def tokens(**changed: Any) -> tuple[int, int]:
        own = SimpleNamespace(**{**vars(model), **{k: changed.pop(k) for k in [*changed] if k in vars(model)}})
        found = largest_micro_batch(own, lengths, 64, replace(size, **changed))  # type: ignore[arg-type]
        return found.packed, found.response

    assert tokens() == (32 * 24 + 4 * 64, 32 * 24)
    assert tokens(group=1) == tokens(replays="trainer") == (32 * 88, 32 * 24)
    assert tokens(layout=ParallelConfig(context=2)) == (32 * 88, 32 * 24)
    assert tokens(train=TrainConfig(max_tokens_per_microbatch=1000)) == (1000, 999), "all of it may be response"
    assert tokens(prompt_tokens=None) == (32 * 88, 32 * 88 - 1), "the lengths are the data's"
