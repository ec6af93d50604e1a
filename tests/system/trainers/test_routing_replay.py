"""Routing replay: the trainer's passes use experts that the engine or the trainer recorded."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.config.checks.routing import check
from mrl.config.schema import RLConfig, RolloutConfig, SyncConfig
from mrl.core import Prompt, Request, Sample, SamplingParams
from mrl.data.collate import collate
from mrl.data.packing import pack
from mrl.families import load_arch
from mrl.inference.engine import Engine
from mrl.inference.errors import BadAnswer, EngineStartError
from mrl.inference.launch import started_with
from mrl.inference.routed import ASK, RoutedShape, joined, whole
from mrl.inference.samples import Expected, generate_body, read_answer
from mrl.inference.server_info import ServerInfo
from mrl.inference.start import start_engine
from mrl.sampling.saved_samples import plain, restored
from mrl.weights.sync.payload import plan_buckets
from mrl.weights.sync.weight_sync import WeightSync
from tests.conftest import TinyModels
from tests.helpers.runs import difference, results, samples, train, train_and_kill
from tests.helpers.slow import slow_cases
from tests.helpers.sync_tools import FileExporter
from tests.helpers.train_tools import given, write_config
from tests.helpers.world import run_world
from tests.system.inference.test_engine_families import sample

pytestmark = pytest.mark.longest

LAYOUTS = ("tp2.ep2", "pp2.cp2/full", *slow_cases("tp2/full", "pp2.vpp2/selective", "cp2.ep2", "ep2"))
SHAPE = RoutedShape(layers=(1, 2), num_layers=3, per_token=2, count=4)


# ---- the trainer


@pytest.fixture(scope="module")
def world(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs a model whose first of four layers is dense: on one rank, and in every layout of four ranks."""
    root, model = tmp_path_factory.mktemp("routing"), tiny_models("glm4_moe", weights=False, num_hidden_layers=4)
    files = [root / name for name in ("reference.pt", "one.json", "layouts.json")]
    run_world(1, "routing.py", model, *files[:2], "one")
    run_world(4, "routing.py", model, files[0], files[2], *LAYOUTS)
    found: dict[str, Any] = json.loads(files[1].read_text())
    return found | json.loads(files[2].read_text())


def test_a_models_own_experts_change_nothing_and_others_do(world: dict[str, Any]) -> None:
    assert world["off"] == world["own experts"] == world["changed by own experts"] == 0.0
    assert world["others change"] > 0.1
    assert world["sequences: own experts"] == 0.0 and world["sequences: others change"] > 0.1
    assert world["sequences: changed in an update"] == 0.0


def test_replayed_log_probs_do_not_depend_on_what_the_router_would_choose(world: dict[str, Any]) -> None:
    """With replay the router's scores of other experts have neither an effect nor a gradient."""
    assert world["router moved: chosen otherwise"] > 0.1 and world["router moved: log-probs, free"] > 0.1
    assert world["router moved: log-probs, replayed"] == 0.0
    assert world["gradient of the others"] == 0.0 < world["gradient of the chosen"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_like_one_rank(world: dict[str, Any], layout: str) -> None:
    found = world[layout]
    assert found["noted"] == 0.0, "routers choose the same, and each choice is noted at its token and layer"
    assert found["changed"] < 1e-12
    assert found["log_probs"] < 2e-5 and found["loss"] < 1e-5 and found["gradient"] < 1e-5, found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_term_of_an_update_has_its_own_experts_or_none(world: dict[str, Any], layout: str) -> None:
    apart, at_once = world[layout]["terms"]
    assert len({round(loss, 4) for loss in apart}) == 3
    assert at_once == pytest.approx(sum(apart), rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_receives_its_share_of_the_experts(world: dict[str, Any], layout: str) -> None:
    """Each rank receives only its share of the experts: every token's experts of a layer are on one rank, except for
    padding. Sizes are compared with those of all tokens on rank 0."""
    whole_bytes, whole = world[layout]["all"]
    shares = world[layout]["shares"]
    assert sum(tokens for _, tokens in shares) == whole, "layers times tokens"
    assert 0.9 * whole_bytes < sum(nbytes for nbytes, _ in shares) < 1.5 * whole_bytes
    receivers = [nbytes for nbytes, _ in shares if nbytes]
    assert len(receivers) == 2 * (2 if "tp2" not in layout else 1) and max(receivers) < 0.8 * whole_bytes


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_nothing_is_kept_of_a_pass(world: dict[str, Any], recompute: str) -> None:
    found = world[f"memory {recompute}"]
    assert found["routers"] == 3 and found["left"] == 0
    early, late = found["live"]
    assert early == late


# ---- samples


def request(number: int, prompt: tuple[int, ...]) -> Request:
    return Request(number, number, Prompt(number, prompt, {}), 0)


def drawn(number: int, prompt: tuple[int, ...], response: list[int]) -> Sample:
    tokens = len(prompt) + len(response)
    experts = (np.arange(tokens * 4).reshape(tokens, 2, 2) + 100 * number).astype(np.uint8)
    experts[-1] = 0
    return Sample(request(number, prompt), response, [-0.5] * len(response), "stop", "3", routed_experts=experts)  # type: ignore[arg-type]


def test_experts_go_where_their_tokens_go() -> None:
    two = [drawn(0, (5, 6), [7, 8, 9]), drawn(1, (5,), [7])]
    again = [restored(one.request, plain(one)) for one in two]  # as from a checkpoint
    rollout = collate(0, again)
    assert rollout.routed_experts is not None and rollout.routed_experts.dtype == torch.uint8
    assert torch.equal(rollout.routed_experts, torch.from_numpy(np.concatenate([one.routed_experts for one in two])))  # type: ignore[misc]
    turned = rollout.join(rollout).pick(torch.tensor([3, 0]))
    assert turned.routed_experts is not None
    assert torch.equal(turned.routed_experts, torch.cat([rollout.routed_experts[5:], rollout.routed_experts[:5]]))
    for rank in range(2):
        packed = pack(rollout, [1, 0], 2, rank, 8)
        real = packed.source >= 0
        assert torch.equal(packed.tokens[0, real], rollout.tokens[packed.source[real]])
        assert not packed.tokens[0, ~real].any() and int(real.sum()) > 0
    with pytest.raises(ValueError, match="some of the batches"):
        rollout.join(replace(rollout, routed_experts=None))


def answer(numbers: Any) -> dict[str, Any]:
    return {"routed_experts": base64.b64encode(np.array(numbers, "<i4").tobytes()).decode()}


def test_an_engines_experts_are_read_without_its_dense_layers() -> None:
    chosen = np.array([[[0, 3], [2, 1]], [[1, 0], [3, 2]]])
    found = SHAPE.read({"routed_experts": SHAPE.written(chosen)}, 3)
    assert found.dtype == np.uint8 and np.array_equal(found[:2], chosen) and not found[2].any()
    assert RoutedShape((0,), 1, 8, 384).dtype == np.int16


def test_a_request_asks_for_the_experts_that_it_does_not_know() -> None:
    experts = [[[1, 2], [3, 0]], [[0, 1], [2, 3]], [[2, 0], [1, 3]], [[3, 1], [0, 2]]]
    requests = [
        replace(request(0, (5, 6, 7, 8)), routed_experts_start=3),
        replace(request(1, (5, 6, 7)), routed_experts_start=1),
    ]
    bodies = [generate_body(each, SamplingParams(), experts=True) for each in (*requests, request(0, (5,)))]
    assert all(body["return_routed_experts"] is True for body in bodies)
    assert [body.get("routed_experts_start_len") for body in bodies] == [3, 1, None]
    answers = [
        {
            "output_ids": [7],
            "meta_info": {
                "finish_reason": {"type": "stop"},
                "prompt_tokens": len(each.prompt.token_ids),
                "weight_version": "0",
                "output_token_logprobs": [[-0.5, 7, None]],
                "routed_experts": SHAPE.written(
                    np.array(experts[each.routed_experts_start : len(each.prompt.token_ids)])
                ),
            },
        }
        for each in requests
    ]
    expected = Expected(10, 4, routed=SHAPE)
    first, second = (read_answer(r, json.dumps(a).encode(), expected) for r, a in zip(requests, answers))
    assert first.routed_experts is not None and first.routed_experts.tolist() == [experts[3], [[0, 0], [0, 0]]]
    assert second.routed_experts is not None and second.routed_experts.tolist() == [
        *experts[1:3],
        [[0, 0], [0, 0]],
    ]
    known = joined(joined(None, SHAPE.read(answer([[0, 0], *experts[0]]), 2)), first.routed_experts)
    assert known is not None and whole(known).tolist() == [experts[0], experts[3], [[0, 0], [0, 0]]]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({}, f"routed_experts is missing: the engine must be started with {ASK}"),
        ({"routed_experts": 3}, "expected a text"),
        ({"routed_experts": "%%%"}, "expected base64"),
        ({"routed_experts": "AAA="}, "expected base64 of int32"),
        (answer(range(6)), "has 6 numbers, expected 3 - 1 tokens x 3 layers x 2 experts"),
        (answer([0, 0, 0, 1, 2, 4] * 2), "names experts 0 to 4, the model has 4"),
        (answer([0, 0, 0, -1, 2, 3] * 2), "names experts -1 to 3"),
        (answer([0, 0, 1, 1, 2, 3] * 2), "the same expert twice"),
    ],
)
def test_answers_that_cannot_be(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(BadAnswer, match=message):
        SHAPE.read(meta, 3)


# ---- requests of experts


def config(tmp_path: Path, mode: str = "engine", **sections: dict[str, Any]) -> RLConfig:
    base: dict[str, Any] = {
        "trainer": "rl",
        "run": {"name": "x", "steps": 3},
        "model": {"path": str(tmp_path)},
        "data": {"train": "-"},
        "reward": {"function": "exact_match"},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "samples_per_minibatch": 4},
        "algorithm": {"adv_estimator": "grpo"},
        "actor": {"routing_replay": mode},
    }
    for key, section in sections.items():
        base[key] = {**base.get(key, {}), **section}
    return RLConfig.model_validate(base)


AGENT = {"agent": {"rollout": "mine.py:Env", "max_tokens": 64}}


@pytest.mark.parametrize(
    ("mode", "family", "sections", "message"),
    [
        ("engine", "qwen3", {}, "engine needs a model with experts"),
        ("trainer", "qwen3", {}, "trainer needs a model with experts"),
        ("engine", "qwen3_moe", {"rollout": {"interrupt": "at_sync", "max_staleness": 1}}, None),
        (
            "engine",
            "qwen3_moe",
            {"rollout": {"interrupt": "at_step_end", "oversample": 2.0}},
            None,
        ),
        ("engine", "qwen3_moe", AGENT, None),
        ("trainer", "qwen3_moe", {"batch": {"samples_per_minibatch": 8}}, "has no effect: the only update of a step"),
        (
            "trainer",
            "qwen3_moe",
            {"algorithm": {"old_log_probs": "engine"}},
            "which old_log_probs: engine skips",
        ),
        (
            "trainer",
            "qwen3_moe",
            {"actor": {"routing_compare_steps": 2}},
            "has no effect: only replay of the engine's routing",
        ),
        ("trainer", "qwen3_moe", {}, None),
        ("engine", "qwen3_moe", {"actor": {"routing_compare_steps": 2}, "rollout": {"max_staleness": 1}}, None),
        ("off", "qwen3", {}, None),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    tiny_models: TinyModels, mode: str, family: str, sections: dict[str, Any], message: str | None
) -> None:
    path = tiny_models(family)
    cfg = config(path, mode, **{name: {**section} for name, section in sections.items()})
    found = list(check(cfg, load_arch(str(path))))
    assert [message in problem.message for problem in found] == ([True] if message else []), found


def test_engines_are_told_at_their_start(tiny_models: TinyModels) -> None:
    path = tiny_models("qwen3_moe")
    assert started_with(config(path)).server_args == (ASK,)
    assert started_with(config(path, rollout={"server_args": ("--x",)})).server_args == (ASK, "--x")
    assert started_with(config(path, "trainer")).server_args == ()
    assert started_with(config(path, rollout={"engine": "transformers"})).server_args == ()


# ---- engines and runs


def test_the_transformers_engine_says_its_experts(tiny_models: TinyModels, tmp_path: Path) -> None:
    """The transformers engine reports its experts, also for fused experts after a sync of one tensor at a time."""
    jobs, found, drawn = tmp_path / "jobs.json", tmp_path / "found.json", []
    for family in (*slow_cases("glm4_moe"), "gpt_oss"):
        old, new = tiny_models(family), tiny_models(family, seed=1)
        with start_engine(RolloutConfig(engine="transformers"), str(old), "float32", tmp_path / family) as engine:
            engine.wait_ready()
            engine.check_experts()
            drawn.append({"name": family, "model": str(old), "temperature": 1.0, "samples": sample(engine, 1.0)})
            [unasked] = engine.generate([request(0, (5, 6))], SamplingParams(max_new_tokens=2))
            assert unasked.routed_experts is None
            if family == "gpt_oss":
                exporter = FileExporter(new)
                with closing(WeightSync(exporter, engine.urls, PROVED, access=engine.pool.access)) as sync:
                    sync._buckets = plan_buckets(exporter.metas(), 1)
                    assert sync.update_weights("1").verified == len(exporter.tensors) == len(sync._buckets)
                drawn.append({"name": "pushed", "model": str(new), "temperature": 1.0, "samples": sample(engine, 1.0)})
    jobs.write_text(json.dumps(drawn))
    run_world(1, "main_job.py", jobs, found, timeout_s=600)
    for gap, at_another_temperature, otherwise in json.loads(found.read_text()).values():
        assert gap < 1e-4 < 1e-2 < at_another_temperature and otherwise == 0.0


@pytest.fixture(scope="module")
def served(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("the engine tests need sglang")
    cfg, model = RolloutConfig(server_args=(ASK,)), str(tiny_models("glm4_moe"))
    with start_engine(cfg, model, "float32", tmp_path_factory.mktemp("logs")) as engine:
        engine.wait_ready()
        yield engine


def test_an_engine_that_does_not_say_is_refused_at_the_start(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    served.check_experts()
    monkeypatch.setattr(served.pool.servers[0], "info", ServerInfo("cpu", True, False))
    with pytest.raises(EngineStartError, match=f"start it with {ASK}"):
        served.check_experts()


PROVED = SyncConfig(transport="http", verify="checksum", timeout_s=60.0)
REPLAYED: dict[str, Any] = {
    "actor": {
        "parallel": {"expert": 2},
        "optimizer": {"lr": 2e-3},
        "recompute": "full",
        "routing_replay": "engine",
        "routing_compare_steps": 2,
    },
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "samples_per_minibatch": 4},
    "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}},
    "checkpoint": {"every_steps": 2, "export_hf": False},
}


@pytest.fixture(scope="module")
def replayed(tiny_models: TinyModels, served: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs GRPO at EP2 with real SGLang, with partial rollouts one step ahead; returns the folder."""
    folder = tmp_path_factory.mktemp("replayed")
    rollout = {"max_staleness": 1, **given(served, folder), "sampling": {"max_new_tokens": 16}}
    rollout |= {"interrupt": "at_step_end", "segment_tokens": 8, "oversample": 1.5}
    run = {"nproc": 2}
    file = write_config(folder, tiny_models("glm4_moe"), run=run, rollout=rollout, **REPLAYED)
    train(folder, file, "run.name=whole", "run.steps=4")
    return folder


def test_a_run_learns_by_the_engines_experts(replayed: Path) -> None:
    rows = results(replayed / "runs/whole")
    first = rows[1]
    assert first["mismatch/routing"] == 0.0 and first["mismatch/max_abs"] < 1e-4, "the same weights"
    assert first["mismatch_free/max_abs"] < 1e-4
    assert rows[3]["mismatch/routing"] > 0 and rows[3]["routing/changed"] > 0, "those of a step before"
    assert rows[3]["mismatch_free/mean_abs"] != rows[3]["mismatch/mean_abs"]
    assert [step for step, row in rows.items() if "mismatch_free/max_abs" in row] == [1, 3]


@pytest.mark.slow
def test_experts_are_replayed_over_in_flight_weight_updates(
    tiny_models: TinyModels, served: Engine, tmp_path: Path
) -> None:
    """The replayed experts of each token are of the weights that generated it."""
    rollout = {
        "max_staleness": 2,
        "interrupt": "at_sync",
        **given(served, tmp_path),
        "sampling": {"max_new_tokens": 48},
    }
    file = write_config(tmp_path, tiny_models("glm4_moe"), run={"nproc": 2}, rollout=rollout, **REPLAYED)
    train(tmp_path, file, "run.steps=6")
    rows = results(tmp_path / "runs/run")
    assert max(row.get("staleness/mixed", 0.0) for row in rows.values()) > 0, "no response has continued"
    assert max(row["mismatch/age_0"] for row in rows.values() if "mismatch/age_0" in row) < 1e-4
    assert max(row.get("mismatch/routing", 0.0) for row in rows.values()) > 0


def test_a_checkpoint_has_the_experts_of_what_was_drawn_ahead(replayed: Path) -> None:
    kept = torch.load(replayed / "runs/whole/checkpoints/step_2/kept.pt", weights_only=True)
    [step] = kept["sampled_steps"]
    for arrays in (each["arrays"] for group in step["groups"] for each in group["samples"]):
        tokens = len(arrays["prompt"]) + len(arrays["response_ids"])
        assert arrays["experts"].dtype == torch.uint8 and arrays["experts"].shape == (tokens, 1, 2)
    assert any(len(part["arrays"]) == 4 for group in kept["segments"] for part in group["parts"]), "none was carried"


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_experts_of_what_was_drawn_ahead(replayed: Path) -> None:
    """A run killed after step 3 resumes with the experts of samples that were generated ahead."""
    file, whole, killed = replayed / "config.yaml", replayed / "runs/whole", replayed / "runs/killed"
    train_and_kill(replayed, killed, file, "run.name=killed", "run.steps=50")
    train(replayed, file, "run.name=killed", "run.steps=4")
    assert results(killed) == results(whole)
    assert samples(killed) == samples(whole)
    assert set(difference(whole, killed).values()) == {0.0}


TALKS = """
class Talks:
    def reset(self, row, rng):
        self.left = 3

    def step(self, turn):
        self.left -= 1
        return f"[{turn.text}] and more words", len(turn.text), self.left == 0
"""


@pytest.mark.slow
def test_a_run_learns_from_turns_by_the_engines_experts(
    tiny_models: TinyModels, served: Engine, tmp_path: Path
) -> None:
    """In trajectories with environment tokens, the engine's experts are those that the trainer chooses."""
    (tmp_path / "program.py").write_text(TALKS)
    actor = {k: v for k, v in REPLAYED["actor"].items() if k != "parallel"}
    file = write_config(
        tmp_path,
        tiny_models("glm4_moe"),
        **{**REPLAYED, "actor": actor, "run": {"steps": 2}},
        rollout={**given(served, tmp_path), "sampling": {"max_new_tokens": 6}},
        agent={"rollout": f"{tmp_path / 'program.py'}:Talks", "max_turns": 3, "max_tokens": 200},
        reward={"function": "environment"},
    )
    train(tmp_path, file)
    first, second = results(tmp_path / "runs/run").values()
    for row in (first, second):
        assert row["agent/turns"] == 3 and row["agent/env_tokens"] > 0
        assert row["mismatch/routing"] == 0.0 and row["mismatch/max_abs"] < 1e-4, "weights that the engine has too"
    assert first["mismatch_free/max_abs"] < 1e-4
    assert second["routing/changed"] > 0, "the second update of a step is not of the weights that drew"


@pytest.mark.slow
def test_a_run_of_experts_in_one_tensor_goes_on_by_the_transformers_engine(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    """gpt-oss at EP2, whose experts are fused: verified syncs give the engine the trained experts, and resuming from
    step 2 is bitwise the same."""
    actor = {k: v for k, v in REPLAYED["actor"].items() if k != "recompute"}
    rollout = {"engine": "transformers", "sampling": {"max_new_tokens": 24}}
    sections = {**REPLAYED, "actor": actor, "run": {"nproc": 2}, "sync": {"verify": "checksum"}, "rollout": rollout}
    file = write_config(tmp_path, tiny_models("gpt_oss"), **sections)
    whole, again = (tmp_path / "runs" / name for name in ("whole", "again"))
    train(tmp_path, file, "run.name=whole", "run.steps=4")
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints/step_4")
    train(tmp_path, file, "run.name=again", "run.steps=4")
    rows = results(whole)
    for row in rows.values():
        assert row["mismatch/routing"] == 0.0 and row["mismatch/max_abs"] < 1e-4, "weights that the engine has too"
    assert all(row["routing/changed"] > 0 for row in rows.values()), "the second update is not of the weights that drew"
    assert results(again) == rows and samples(again) == samples(whole)
    assert set(difference(whole, again).values()) == {0.0}


def test_a_run_replays_its_own_experts(tiny_models: TinyModels, served: Engine, tmp_path: Path) -> None:
    actor = {"routing_replay": "trainer", "optimizer": {"lr": 1e-2}}
    rollout = {**given(served, tmp_path), "sampling": {"max_new_tokens": 16}}
    batch = {"prompts_per_step": 4, "samples_per_prompt": 2, "samples_per_minibatch": 2}
    model, run = tiny_models("glm4_moe"), {"nproc": 1, "steps": 1}
    train(tmp_path, write_config(tmp_path, model, actor=actor, rollout=rollout, batch=batch, run=run))
    (row,) = results(tmp_path / "runs/run").values()
    assert 0 < row["routing/changed"] < 1, "after the first update the routers would choose otherwise"
    assert "mismatch/routing" not in row and row["mismatch/max_abs"] < 1e-4
