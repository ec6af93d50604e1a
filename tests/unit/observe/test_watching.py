"""Watching a run: measured steps next to the plan, the page that shows them, and trackers across a resume."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
import torch

from mrl import platform

platform.install()

from mrl.cli import main  # noqa: E402
from mrl.config.derived import Machine  # noqa: E402
from mrl.config.loader import dump_resolved, load  # noqa: E402
from mrl.config.schema import AnyConfig, SFTConfig  # noqa: E402
from mrl.core import StepStats  # noqa: E402
from mrl.inference.load import Load, Meter  # noqa: E402
from mrl.observe import Recorder, append_jsonl, read_metrics, trackers, write_report  # noqa: E402
from mrl.observe.progress import THREE_DIGITS, number  # noqa: E402
from mrl.observe.remote_tracker import Outcome, RemoteTracker, TrackedStep  # noqa: E402
from mrl.plan import picture  # noqa: E402
from mrl.plan.chips import CHIPS, Assumptions, Cluster, chip_named  # noqa: E402
from mrl.plan.forecast import PHASES, Samples, forecast  # noqa: E402
from mrl.plan.placement import Placement  # noqa: E402
from mrl.plan.plan import Plan, machine_of, make_plan, read_shapes  # noqa: E402
from mrl.plan.workload import models_of  # noqa: E402
from mrl.trainers import sft  # noqa: E402
from mrl.trainers.rl.sample_metrics import load_metrics  # noqa: E402
from mrl.trainers.shared import run_plan as beside  # noqa: E402
from tests.conftest import TinyModels  # noqa: E402
from tests.unit.evaluation.test_eval import sampling  # noqa: E402

ROOT = Path(__file__).parents[3]
H100 = "NVIDIA H100 80GB HBM3"


# ---- the prediction


@pytest.mark.parametrize(
    ("device", "chip"),
    [
        (H100, "h100-80g"),
        ("NVIDIA H200", "h200"),
        ("A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_chip_is_known_by_its_driver_s_name_alone(device: str, chip: str | None) -> None:
    found = chip_named(device)
    assert (found.name if found else None) == chip


@pytest.fixture(scope="module")
def ppo() -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        cfg = load("yaml_configs/ppo_llama70b_64gpu.yaml", planned=lambda cfg: machine_of(cfg, None, 8))
        return make_plan(cfg, Cluster(CHIPS["h100-80g"], 64), read_shapes(cfg), Assumptions())


ALL = ("rollout", "experience", "update", "sync")


def as_planned(plan: Plan, **changed: float) -> Samples:
    size, lengths = plan.work.size, plan.work.lengths
    assert size.prompt_tokens is not None and size.response_tokens is not None
    samples = Samples(size.learnt, lengths.prompt, lengths.response, size.prompt_tokens, size.response_tokens)
    return Samples(**{**asdict(samples), **changed})


def test_a_step_as_the_plan_assumes_it_takes_what_the_plan_says(ppo: Plan) -> None:
    found = forecast(ppo, as_planned(ppo), ALL, ("actor", "critic"))
    by_phase = dict.fromkeys((*ALL, "offload"), 0.0)
    for part in ppo.parts:
        by_phase[PHASES.get(part.phase, part.phase)] += part.seconds
    assert found == pytest.approx(by_phase) and sum(found.values()) == pytest.approx(ppo.seconds)


def test_a_step_s_own_lengths_and_parts_count(ppo: Plan) -> None:
    usual = forecast(ppo, as_planned(ppo), ALL, ("actor", "critic"))
    long = forecast(ppo, as_planned(ppo, response=1.5 * ppo.work.lengths.response), ALL, ("actor", "critic"))
    assert all(long[phase] > usual[phase] for phase in ("rollout", "experience", "update"))
    assert long["sync"] == usual["sync"]
    warm_up = forecast(ppo, as_planned(ppo), ("rollout", "experience", "update"), ("critic",))
    assert warm_up["update"] < usual["update"] and "sync" not in warm_up


def test_a_step_s_metrics_have_the_plan_of_what_it_did(ppo: Plan) -> None:
    def planned(**skipped: float) -> dict[str, float]:
        stats = StepStats(1, {f"{name}/skipped": value for name, value in skipped.items()})
        phases = ALL if "actor" in skipped else ALL[:-1]
        stats.seconds = dict.fromkeys(phases, 1.0)
        lens = torch.tensor([100, 300])
        learnt: Any = SimpleNamespace(num_samples=2, prompt_lens=lens, response_lens=2 * lens)
        return beside.RunPlan(ppo).metrics(stats, learnt)

    whole, warm_up = planned(actor=0.0, critic=0.0), planned(critic=0.0)
    assert {"plan/rollout_s", "plan/update_s", "plan/sync_s", "plan/offload_s"} < whole.keys()
    assert whole["plan/step_s"] == pytest.approx(sum(s for name, s in whole.items() if name != "plan/step_s"))
    assert warm_up["plan/update_s"] < whole["plan/update_s"] and "plan/sync_s" not in warm_up


def test_engines_are_drawn_where_they_are(ppo: Plan) -> None:
    """The page shows engines where they run: an engine of tensor 2 on the first GPUs of each node, or engine
    processes next to CPU ranks."""
    keys = {"servers": 1, "tensor": 2}
    cfg = ppo.cfg.model_copy(update={"rollout": ppo.cfg.engines()[0].model_copy(update=keys)})  # type: ignore[index]
    archs = {name: model.arch for name, model in ppo.work.models.items()}
    models = {model.name: model for model in models_of(cfg, archs, 64, on_gpu=True, fused=True)}
    gpus = Placement.of(cfg, models, Machine(64, 8, gpus=8, joined=True))
    assert {rank: engine for rank, engine in gpus.engine_of.items() if rank < 16} == {0: 0, 1: 0, 8: 1, 9: 1}
    cpus = Placement.of(cfg, models, Machine(64, 8, gpus=0, joined=True))
    assert not cpus.engine_of and cpus.beside[7] == (7,) and cpus.data()["engines_beside"]["1"] == [1]
    for places in (gpus, cpus):
        words = list(ElementTree.fromstring(picture.draw(places)).itertext())
        assert words.count("engine 7") in (1, 2) and "rank 63" in words and "node 7" in words


# ---- a run


def sft_config(folder: Path, path: Path, dtype: str = "bfloat16", **run: Any) -> SFTConfig:
    rows = (json.dumps({"prompt": f"{n} + {n} =", "answer": str(n + n)}) for n in range(12))
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    return SFTConfig.model_validate(
        {
            "trainer": "sft",
            "run": {"name": "run", "root": str(folder / "runs"), "trackers": (), "timeout_s": 120.0, **run},
            "model": {"path": str(path), "dtype": dtype},
            "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 32},
            "batch": {"samples_per_step": 4},
            "checkpoint": {"every_steps": 2, "asynchronous": False},
        }
    )


def test_each_step_says_what_it_was_beside_the_plan(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step reports its measurements next to the plan. The GPU's name is simulated, so that there is a plan;
    nothing runs on a GPU."""
    monkeypatch.setattr(platform, "gpu_names", lambda: [H100])
    with sft.SFTLoop(sft_config(tmp_path, tiny_models("llama"), steps=2)) as loop:
        loop.fit()
    shown, rows = capsys.readouterr().out, read_metrics(tmp_path / "runs/run")
    for row in rows:
        assert row["perf/mfu"] == pytest.approx(row["perf/tflop_per_s_per_rank"] / 989.5)
        assert row["plan/update_s"] == row["plan/step_s"] > 0 and "plan/rollout_s" not in row
        assert row["memory/resident_gib/update"] > 0
    assert re.search(r"step 2/2 \|.* MFU 0\.0% \| update \d+\.\ds \(100%, plan 0\.0s\)", shown), shown
    assert shown.count("the plan: A step takes about") == 1 and "no MFU" not in shown
    plan = json.loads((tmp_path / "runs/run/plan.json").read_text())
    assert plan["gpu"] == "h100-80g" and plan["models"]["actor"]["layers"] == "local", "what the run has"
    assert "rank 0" in (tmp_path / "runs/run/ranks.svg").read_text()


class Elsewhere(RemoteTracker):
    """A tracker that records which runs were opened."""

    package: ClassVar[str] = "json"
    opened: ClassVar[list[str | None]] = []
    steps: ClassVar[list[int]] = []

    def __init__(self, cfg: Any, run_dir: Path) -> None:
        pass

    def open(self, run_id: str | None) -> str:
        self.opened.append(run_id)
        return run_id or "run-7"

    def where(self) -> str:
        return "elsewhere"

    def send(self, rows: Sequence[TrackedStep]) -> None:
        self.steps.extend(row.step for row in rows)

    def close(self, outcome: Outcome) -> None:
        pass


def test_without_a_gpu_nothing_is_made_up_and_a_checkpoint_knows_the_tracker_s_run(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Elsewhere)
    with sft.SFTLoop(sft_config(tmp_path, tiny_models("llama"), steps=2, trackers=("wandb",))) as loop:
        loop.fit()
    run_dir = tmp_path / "runs/run"
    shown = capsys.readouterr().out
    assert shown.count("no MFU and no predicted step times: both need a GPU") == 1 and "MFU 0" not in shown
    rows = read_metrics(run_dir)
    assert not [name for row in rows for name in row if name.startswith("plan/") or name == "perf/mfu"]
    assert json.loads((run_dir / "plan.json").read_text())["why"] == "both need a GPU"
    assert not [name for row in rows for name in row if name.startswith("time/checkpoint_")]

    (run_dir / "trackers/wandb.json").unlink()  # now only the checkpoint has the id
    monkeypatch.setattr(beside, "make_plan", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(platform, "gpu_names", lambda: [H100])
    with sft.SFTLoop(sft_config(tmp_path, tiny_models("llama"), steps=3, trackers=("wandb",))) as loop:
        loop.fit()
    assert Elsewhere.opened == [None, "run-7"] and Elsewhere.steps == [1, 2, 1, 2, 3]
    shown = capsys.readouterr().out
    assert (
        "no predicted step times: the plan failed: ZeroDivisionError: division by zero" in shown and "step 3/3" in shown
    )


def test_a_gpu_that_the_plan_does_not_know_and_a_float32_run_say_so(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, dtype, why in (
        ("NVIDIA L4", "bfloat16", "not this GPU (NVIDIA L4)"),
        (H100, "float32", "dtype is float32"),
    ):
        monkeypatch.setattr(platform, "gpu_names", lambda name=name: [name])
        cfg = sft_config(tmp_path, tiny_models("llama"), dtype=dtype)
        with Recorder(tmp_path, 1, live=False) as recorder:
            assert beside.plan_run(cfg, tmp_path, recorder) is None
        assert why in capsys.readouterr().out


RISING = {"critic": {"warmup_steps": 5}, "algorithm": {"adv_estimator": "gae"}}
RENEWED = {
    "ref": {"policy": "refreshed", "refresh_every_steps": 50},
    "algorithm": {"adv_estimator": "grpo", "kl": {"use_in_loss": True, "coef": 0.1}},
}


def profiled(monkeypatch: pytest.MonkeyPatch, file: Path, *words: str) -> AnyConfig:
    """Runs `mrl profile` and returns the configuration that it starts."""
    started: list[AnyConfig] = []
    monkeypatch.setattr("mrl.commands.world.start_local", lambda cfg, *_: started.append(cfg) or 0)
    assert main(["profile", str(file), *words]) == 0
    return started[0]


def test_mrl_profile_trains_a_run_of_its_own(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_resolved(sft_config(tmp_path, tiny_models("llama"))))
    run = profiled(monkeypatch, file, "--steps", "2,3").run
    assert (run.name, run.steps, run.last_step, run.existing) == ("run-profile", 100, 3, "move_aside")
    assert run.profile is not None and (run.profile.steps, run.profile.ranks) == ((2, 3), (0,))
    assert profiled(monkeypatch, file, "batch.epochs=2").run.last_step == 2


@pytest.mark.parametrize("keys", [RISING, RENEWED])
def test_a_run_with_a_long_beginning_can_be_profiled(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    file = sampling(tmp_path, tiny_models("llama"), **keys)
    assert profiled(monkeypatch, file, "data.validation=null").run.last_step == 2


# ---- engines


def test_a_meter_counts_requests_at_once_and_the_time_with_any() -> None:
    seconds = iter([0.0, 1.0, 3.0, 4.0, 9.0, 10.0, 11.0])
    meter = Meter(now=lambda: next(seconds))
    meter.begin(2)  # at time 1
    meter.begin(4)  # at time 3
    meter.end(6)  # at time 4; idle until 9
    meter.begin(1)  # at time 9
    load = meter.take()  # at time 10
    assert (load.requests, load.seconds, load.most) == (7, 4.0, 6)
    assert load.mean == pytest.approx((2 * 2 + 6 * 1 + 1 * 1) / 4)
    assert meter.take().most == 1, "what is still under way"
    assert load_metrics([], load) == load_metrics([Load(0, 0, 0, 0.0, 0.0, 0)], load) == {}, "nothing was measured"


def test_no_request_is_lost_between_the_thread_that_draws_and_the_one_that_takes_the_counts() -> None:
    meter, loads, before = Meter(), [], sys.getswitchinterval()

    def draw() -> None:
        for _ in range(20_000):
            meter.begin(1)
            meter.end(1)

    threads = [threading.Thread(target=draw) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            loads.append(meter.take())
    finally:
        sys.setswitchinterval(before)
    loads.append(meter.take())
    assert sum(load.requests for load in loads) == 40_000 and meter.running == 0


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [(-0.0001, ".2f", "0.00"), (-0.004, ".1%", "-0.4%"), (-0.0, ".2e", "0.00e+00"), (91234.5, THREE_DIGITS, "91,234"),
     (0.00123456, THREE_DIGITS, "0.00123"), (-3e-5, ".4f", "0.0000")],
)  # fmt: skip
def test_numbers_of_a_step_s_line(value: float, form: str, text: str) -> None:
    assert number(value, form) == text


# ---- the page


def recorded(run_dir: Path) -> None:
    """Records three steps of a run on two GPUs, with all files that the page uses."""
    with Recorder(run_dir, 3, live=False) as recorder:
        for step in (1, 2, 3):
            speed = {"perf/tokens_per_s": 900.0, "perf/tflop_per_s_per_rank": 400.0, "perf/mfu": 0.4}
            plan = {"plan/update_s": 2.0, "plan/step_s": 2.0}
            sync = {"perf/sync_s": 1.0, "sync/bytes": 2.0**31, "perf/sync_network_s": 0.5}
            sync |= {"sync/network_bytes": 2.0**30}
            memory = {"memory/peak_gib/update": 1.0, "memory/peak_gib/actor_update": 30.0 + step}
            engines = {"engines/waiting": 12.0, "engines/tokens_per_s_slowest": 500.0}
            recorder.log(StepStats(step, speed | plan | sync | memory | engines, {"update": 3.0, "validation": 1.0}))
            load = {"requests": 64, "samples": 64, "tokens": 5000, "seconds": 10.0, "mean": 30.5, "most": 32}
            append_jsonl(run_dir / "engines.jsonl", {"step": step, "engines": {"http://10.0.0.1:30000": load}})
    plan_of_it = {
        "gpu": "h100-80g", "gpus": 2, "gpu_bytes": 80 << 30, "tensors_of_rank_0": {"actor_update": 40 << 30},
        "memory": {"actor_update": {"rank": 1, "bytes": 60 << 30}},
    }  # fmt: skip
    (run_dir / "plan.json").write_text(json.dumps(plan_of_it))
    (run_dir / "ranks.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"></svg>')


def cells(page: str, first: str) -> list[str]:
    """Returns the cells of the table row that begins with `first`."""
    row = re.search(rf"<tr><td>{re.escape(first)}</td>(.*?)</tr>", page)
    assert row is not None, first
    return re.findall(r"<td[^>]*>(.*?)</td>", row[1])


def test_the_page_has_the_measured_beside_the_planned(tmp_path: Path) -> None:
    recorded(tmp_path)
    page = write_report(tmp_path).read_text()
    assert cells(page, "update") == ["3", "3.00", "75%", "2.00", "1.50"]
    assert cells(page, "validation") == ["3", "1.00", "25%", "", ""]
    assert cells(page, "all planned phases") == ["", "3.00", "", "2.00", "1.50"]
    assert cells(page, "actor_update") == ["33.00", "40.00", "60.0 of 80 (rank 1)"]
    assert cells(page, "http://10.0.0.1:30000") == ["64", "5,000", "30.5", "32", "500"]
    assert cells(page, "from the sending ranks to other nodes") == ["0.500", "1.0 GiB", "2.0 GiB/s"]
    assert cells(page, "whole sync") == ["1.00", "2.0 GiB", "2.0 GiB/s"]
    assert "12.0 requests waited" in page and "MFU, median" in page and "Plan for 2 x h100-80g" in page
    assert 'alt="Placement"' in page and 'alt="MFU"' in page


def test_a_run_of_before_has_a_page_without_them(tmp_path: Path) -> None:
    with Recorder(tmp_path, 1, live=False) as recorder:
        recorder.log(StepStats(1, {"perf/tokens_per_s": 900.0}, {"update": 3.0}))
    page = write_report(tmp_path).read_text()
    assert cells(page, "update") == ["1", "3.00", "100%"], "columns that say nothing are left out"
    assert "Placement" not in page and "prediction" not in page and "Engines" not in page


@pytest.mark.parametrize(
    ("file", "content"),
    [("plan.json", "{"), ("plan.json", "[]"), ("engines.jsonl", '{"step": 1, "engines": {"a": 2}}\n')],
)
def test_a_file_that_no_run_has_written_so_is_named(
    file: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path)
    (tmp_path / file).write_text(content)
    assert main(["report", str(tmp_path)]) == 1
    assert f"mrl: {tmp_path / file}" in capsys.readouterr().err
