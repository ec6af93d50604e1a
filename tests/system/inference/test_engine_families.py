"""One real SGLang server per family: its log-probs equal the trainer's, and it holds the weights synced to it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config.schema import RolloutConfig
from mrl.core import Prompt, Request, Sample, SamplingParams
from mrl.families import load_arch
from mrl.families.engine_names import joined_tensors
from mrl.inference.engine import Engine
from mrl.inference.routed import ASK
from mrl.inference.seeds import sample_seed
from mrl.inference.start import start_engine
from mrl.weights.errors import SyncError, SyncMismatch
from mrl.weights.sync.payload import Bucket, plan_buckets
from mrl.weights.sync.weight_sync import WeightSync
from tests.conftest import TinyModels
from tests.helpers.served import DELTAS, TRANSPORTS, Served, check_deltas, check_transport, check_world, world
from tests.helpers.slow import slow_cases
from tests.helpers.sync_tools import FileExporter
from tests.helpers.tiny import MOE_FAMILIES, MOONLIGHT
from tests.helpers.world import run_world

pytestmark = [
    pytest.mark.longest,
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="the engine tests need sglang"),
]
LOG_PROB_TOLERANCE = 1e-4
TEMPERATURES = (1.0, 0.7)
# family -> (model settings, tensor parallelism of the engine); for Llama see test_sync_engine.py
FAMILIES: dict[str, tuple[dict[str, Any], int]] = dict(
    (
        ("qwen2", ({"tied": True, "vocab_size": 301}, 2)),
        ("qwen3_moe", ({}, 1)),
        ("deepseek_v3", ({}, 1)),
        ("gemma3_text", ({"vocab_size": 301}, 2)),
        *slow_cases(
            ("qwen3", ({}, 1)),
            ("mistral", ({}, 1)),
            ("mixtral", ({}, 1)),
            ("glm4_moe", ({}, 1)),
            ("moonlight", (MOONLIGHT, 1)),
            ("qwen2_moe", ({}, 1)),
            ("olmo2", ({"vocab_size": 301}, 2)),
            ("olmo3", ({}, 1)),
            ("phi3", ({}, 2)),
            ("smollm3", ({"vocab_size": 301, "tied": True}, 1)),
        ),
    )
)
BY_ALL_TRANSPORTS = ("qwen2", "qwen3_moe")  # the slow tier also tests the other families

ONE_OF = {"moonlight": "deepseek_v3"}


@pytest.fixture(scope="module")
def served(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """Starts all servers at once, so that their starts share the machine's cores."""
    found = {}
    with contextlib.ExitStack() as stack:
        for family, (settings, tensor) in FAMILIES.items():
            old, new = (tiny_models(ONE_OF.get(family, family), seed=seed, **settings) for seed in (0, 1))
            logs = tmp_path_factory.mktemp(f"logs_{family}")
            experts = load_arch(str(old)).experts is not None
            cfg = RolloutConfig(tensor=tensor, server_args=(*DELTAS, *((ASK,) if experts else ())))
            engine = stack.enter_context(start_engine(cfg, str(old), "float32", logs))
            found[family] = Served(engine, old, new, tensor)
        for one in found.values():
            one.engine.wait_ready()
            if one.engine.routed is not None:
                one.engine.check_experts()
        yield found


def sample(engine: Engine, temperature: float) -> list[dict[str, Any]]:
    prompts = [tuple(10 + (7 * n + k) % 290 for k in range(1 + 3 * n)) for n in range(12)]
    requests = [Request(n, n, Prompt(n, ids, {}), sample_seed(1, 0, n)) for n, ids in enumerate(prompts)]
    params = SamplingParams(temperature=temperature, max_new_tokens=40, return_routed_experts=engine.routed is not None)
    samples: list[Sample] = engine.generate(requests, params)
    return [
        {
            "prompt": s.request.prompt.token_ids,
            "response": s.response_ids.tolist(),
            "log_probs": s.log_probs.tolist(),
            "experts": None if s.routed_experts is None else s.routed_experts.tolist(),
        }
        for s in samples
    ]


def job(family: str, temperature: float, engine: Engine, model: Path) -> dict[str, Any]:
    name, drawn = f"{family} {temperature}", sample(engine, temperature)
    return {"name": name, "model": str(model), "temperature": temperature, "samples": drawn}


def push_apart(sync: WeightSync, exporter: FileExporter, *, at_once: bool = True) -> None:
    """Syncs in buckets of one tensor each, except for tensors that an engine must receive together."""
    sync._buckets = plan_buckets(exporter.metas(), 1, joined_tensors(exporter.arch) if at_once else {})
    sync.update_weights("7")


@pytest.fixture(scope="module")
def gaps(
    tiny_models: TinyModels,
    served: dict[str, Served],
    sglang_engine: Engine,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[float]]:
    """Returns FAMILY TEMPERATURE -> max |engine - trainer|, the same with a trainer at another temperature, and the
    share of experts that they choose differently. The second temperature follows a sync of other weights, one tensor
    per bucket."""
    folder = tmp_path_factory.mktemp("gaps")
    jobs = [job("llama", t, sglang_engine, tiny_models("llama")) for t in TEMPERATURES]
    for family, one in served.items():
        jobs.append(job(family, TEMPERATURES[0], one.engine, one.old))
        with contextlib.closing(one.sync()) as sync:
            push_apart(sync, FileExporter(one.new))
        jobs.append(job(family, TEMPERATURES[1], one.engine, one.new))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run_world(1, "main_job.py", folder / "jobs.json", folder / "results.json", timeout_s=300)
    results: dict[str, list[float]] = json.loads((folder / "results.json").read_text())
    return results


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("family", ("llama", *FAMILIES))
def test_log_probs_of_engine_and_trainer(family: str, temperature: float, gaps: dict[str, list[float]]) -> None:
    gap, at_another_temperature, _ = gaps[f"{family} {temperature}"]
    assert gap <= LOG_PROB_TOLERANCE < 1e-2 < at_another_temperature


@pytest.mark.parametrize("family", [family for family in FAMILIES if ONE_OF.get(family, family) in MOE_FAMILIES])
def test_engine_and_trainer_choose_the_same_experts(family: str, gaps: dict[str, list[float]]) -> None:
    """Engine and trainer choose the same experts for all tokens in all MoE layers, as routing replay needs."""
    assert [gaps[f"{family} {t}"][2] for t in TEMPERATURES] == [0.0, 0.0]


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[] if family in BY_ALL_TRANSPORTS else [pytest.mark.slow]) for family in FAMILIES],
)
def test_a_family_over_every_transport(family: str, served: dict[str, Served], tmp_path: Path) -> None:
    one = served[family]
    expected = one.load(one.new)
    for transport in TRANSPORTS:
        check_transport(one, transport, expected)
    if FileExporter(one.new).arch.experts:
        check_world(one, world(one, [{"expert": 2}], ("shared_memory", "distributed"), tmp_path), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_changed_elements_only(family: str, served: dict[str, Served]) -> None:
    check_deltas(served[family], "distributed" if served[family].tensor > 1 else "http")


def test_tensors_that_an_engine_takes_at_once_only_come_at_once(served: dict[str, Served]) -> None:
    """Tensors that the engine joins arrive in one bucket. In buckets of one tensor the engine would report success and
    keep half of them."""
    one = served["deepseek_v3"]
    expected, exporter = one.load(one.new), FileExporter(one.new)
    for at_once in (True, False):
        one.load(one.old)
        with contextlib.closing(one.sync("http")) as sync:
            with contextlib.nullcontext() if at_once else pytest.raises(SyncMismatch, match="fused_qkv_a_proj"):
                push_apart(sync, exporter, at_once=at_once)
        assert (one.hashes() == expected) == at_once


@pytest.mark.parametrize("family", ["qwen2", *slow_cases("mixtral")])
def test_killed_in_the_middle_of_a_push(family: str, served: dict[str, Served]) -> None:
    """A sync fails cleanly if an engine of two ranks, or of one, is killed during it. Must be the file's last test,
    since it ends these servers."""
    one = served[family]
    with contextlib.closing(one.sync("distributed")) as sync:
        sync.update_weights("8")
        assert sync._transport is not None
        send = sync._transport.send

        def kill_then_send(bucket: Bucket, flat: torch.Tensor) -> None:
            one.engine.close()
            send(bucket, flat)

        sync._transport.send = kill_then_send  # type: ignore[method-assign]
        started = time.monotonic()
        with pytest.raises(SyncError, match="sending failed: .*update_weights_from_distributed: no answer"):
            sync.update_weights("9")
        assert time.monotonic() - started < 60.0
