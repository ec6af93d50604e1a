"""Groups that are under way over pushes: none too old, each learnt once, in order; which weights drew which token."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.config.engines import ENGINES, EngineKind
from mrl.config.schema import RolloutConfig
from mrl.core import Prompt, Request, Sample, SamplingParams
from mrl.rollout import Engine, RequestQueue, ServerLost, sample_seed, start_engine
from mrl.rollout.check import check_server
from mrl.rollout.errors import EngineError
from tests.conftest import TinyModels
from tests.helpers.runs import difference, results, samples, train
from tests.helpers.train_tools import ROOT, Train, given, write_config

pytestmark = pytest.mark.longest

WANTED, MEMBERS, STEPS = 3, 2, 40
WAIT_S, RUN_S = 60.0, 300.0
FAULTS = ROOT / "tests/worlds/faults"
FAR = ("rollout.mismatch={warn: null, stop: null, warn_sample: null, stop_sample: null}",)  # of what fp8 rounds here


def request(group: int, member: int) -> Request:
    return Request(group * MEMBERS + member, group, Prompt(group, (1, 2), {}), sample_seed(1, group, member))


# ---- real engines


def test_each_span_has_the_log_probs_of_the_weights_that_it_names(
    tiny_models: TinyModels, sglang_engine: Engine
) -> None:
    """All weights are exchanged in the middle of long responses, again and again."""
    weights = [tiny_models("llama"), tiny_models("llama", seed=1)]
    found: list[Sample] = []
    queue = RequestQueue()
    sampling = SamplingParams(max_new_tokens=160)
    drawing = threading.Thread(target=lambda: sglang_engine.follow(queue, sampling, found.extend))
    sglang_engine.versions |= {str(number) for number in range(1000)}
    with closing(sglang_engine.client(sglang_engine.urls[0])) as client:
        client.update_weights_from_disk(str(weights[0]), weight_version="0")
        drawing.start()
        for group in range(2):
            queue.put([request(group, member) for member in range(MEMBERS)])
        queue.end()
        version, end = 0, time.monotonic() + WAIT_S
        while drawing.is_alive() and time.monotonic() < end:
            version += 1
            client.pause()
            client.update_weights_from_disk(str(weights[version % 2]), weight_version=str(version))
            client.flush_cache()
            client.go_on()
            drawing.join(0.3)
        drawing.join(WAIT_S)
        client.update_weights_from_disk(str(weights[0]), weight_version="default")
    assert len(found) == 2 * MEMBERS
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in weights]
    mixed = 0
    for sample in found:
        assert sample.token_weight_versions is not None
        gaps = [gap(model, sample) for model in models]
        own = sample.token_weight_versions % 2
        assert max(float(gaps[n][own == n].max()) for n in {*own.tolist()}) < 1e-4
        assert max(float(gaps[1 - n][own == n].max()) for n in {*own.tolist()}) > 1e-2
        mixed += len({*own.tolist()}) > 1
    assert mixed, "no response has gone on over a change of weights"


def gap(model: Any, sample: Sample) -> np.ndarray:
    """[n]: the engine's log-probs against those of a whole forward pass."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    with torch.no_grad():
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
    found = log_probs.gather(1, ids[1:, None]).flatten()[-len(sample.response_ids) :]
    return np.abs(found.numpy() - sample.log_probs)


def test_an_engine_that_a_killed_trainer_left_paused_goes_on(tiny_models: TinyModels, sglang_engine: Engine) -> None:
    url = sglang_engine.urls[0]
    with closing(sglang_engine.client(url)) as client:
        client.pause()
    cfg = RolloutConfig(startup_timeout_s=WAIT_S)
    check_server(url, sglang_engine.access, cfg, str(tiny_models("llama")), "llama", "float32", outlives=True)


def config(folder: Path, model: Path, **rollout: Any) -> Path:
    sampling = {"max_new_tokens": 24, "stop_token_ids": list(range(3, 320, 7))}
    return write_config(
        folder,
        model,
        actor={"parallel": {"tensor": 2}, "optimizer": {"lr": 5e-4}},
        batch={"prompts_per_step": 4, "samples_per_prompt": 2, "samples_per_minibatch": 4},
        algorithm={"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}},
        data={"validation": str(folder / "validation.jsonl")},
        validation={"every_steps": 3, "prompts": 4},
        checkpoint={"every_steps": 2, "export_hf": False},
        rollout={"sampling": sampling, **rollout},
    )


def test_a_bound_of_nothing_is_the_synchronous_loop_to_the_bit(
    tiny_models: TinyModels, sglang_engine: Engine, tmp_path: Path
) -> None:
    file = config(tmp_path, tiny_models("llama"), **given(sglang_engine, tmp_path))
    train(tmp_path, file, "run.name=waits", "run.steps=4")
    bounded = ("rollout.overlap=bounded", "rollout.max_staleness=0", "sync.transport=distributed")
    train(tmp_path, file, "run.name=goes_on", "run.steps=4", *bounded)
    waits, goes_on = (tmp_path / "runs" / name for name in ("waits", "goes_on"))
    assert set(difference(waits, goes_on).values()) == {0.0}
    assert samples(waits) == samples(goes_on)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ways", "numerics"),
    [
        (("actor.lora={rank: 4}", "actor.optimizer.lr=5e-3", "sync.transport=http", "sync.verify=checksum"), 1e-4),
        (("replay={buffer_prompts: 8, prompts_per_step: 2}", "sync.transport=disk"), 1e-4),
        (("actor.precision.fp8={recipe: blockwise, emulate: true}", *FAR, "sync.verify=checksum"), None),
    ],
    ids=["adapters merged, by http, proved", "samples of earlier steps, by files", "a trainer in fp8, proved"],
)
def test_other_ways_of_pushing_and_learning(
    tiny_models: TinyModels, sglang_engine: Engine, tmp_path: Path, ways: tuple[str, ...], numerics: float | None
) -> None:
    """numerics: of engine and trainer under the same weights, in nats a token. None: no more than a single token of the
    first step has, for a step may have one token that is so new"""
    behind = {"overlap": "bounded", "max_staleness": 1}
    file = config(tmp_path, tiny_models("llama"), **behind, **given(sglang_engine, tmp_path))
    train(tmp_path, file, "run.steps=4", *ways)
    rows = results(tmp_path / "runs/run")
    assert len(rows) >= 4 and all(row["staleness/max"] <= 1 for step, row in rows.items() if step)
    limit = numerics or rows[1]["mismatch/max_abs"]
    assert max(row.get("mismatch/age_0", 0.0) for row in rows.values()) < limit, "a token is of other weights"
    assert numerics is None or rows[4]["mismatch/age_1"] > limit, "nothing was learnt, or nothing was pushed"


class Held(Train):
    """A run that is held before these calls of engines."""

    def __init__(self, folder: Path, config: Path, *overrides: str, calls: list[dict[str, Any]]) -> None:
        self._calls = folder / "held.json"
        self._calls.write_text(json.dumps(calls))
        super().__init__(folder, config, *overrides, PYTHONPATH=f"{FAULTS}:{ROOT}", MRL_TEST_HELD=str(self._calls))

    def wait_until_held(self, number: int) -> None:
        end = time.monotonic() + RUN_S
        while not Path(f"{self._calls}.{number}").exists():
            assert self._process.poll() is None and time.monotonic() < end, self.terminal[-4000:]
            time.sleep(0.05)

    def release_resources(self, number: int) -> None:
        Path(f"{self._calls}.{number}.go").touch()


def learnt_once(run_dir: Path, steps: int) -> None:
    """4 of 24 rows a step, each once a pass; no token too old, and those of the newest weights are of the trainer's."""
    rows, drawn = results(run_dir), samples(run_dir)
    assert [step for step in rows if step] == [*range(1, steps + 1)]
    learnt = [[row["index"] for row in drawn[f"step_{step}.jsonl"][::2]] for step in range(1, steps + 1)]
    for first in range(0, steps, 6):
        found = sum(learnt[first : first + 6], [])
        assert len({*found}) == len(found) == 4 * min(6, steps - first), "a row is there twice in a pass, or not at all"
    assert all(0 <= row["staleness/max"] <= 2 for step, row in rows.items() if step)
    assert max(row["staleness/max"] for step, row in rows.items() if step) > 0
    fresh = [row["mismatch/age_0"] for step, row in rows.items() if "mismatch/age_0" in row]
    assert max(fresh) < 1e-4, "a token is not of the weights that it names"


def test_over_a_kill_in_a_push_no_prompt_is_lost_or_learnt_twice(
    tiny_models: TinyModels, sglang_engine: Engine, tmp_path: Path
) -> None:
    """The trainer is killed while its engine is paused, and goes on with the same engine."""
    behind = {"overlap": "bounded", "max_staleness": 2}
    file = config(tmp_path, tiny_models("llama"), **behind, **given(sglang_engine, tmp_path))
    by = "sync.transport=shared_memory"
    with Held(tmp_path, file, "run.steps=50", by, calls=[{"call": "begin_weight_update", "nth": 6}]) as run:
        run.wait_for("step_2 is complete", RUN_S)
        run.wait_until_held(0)
        for pid, command in run.processes().items():
            if " train " in command:
                os.kill(pid, signal.SIGKILL)
        run.wait(30)
        assert run.left_running() == {}
    assert max(results(tmp_path / "runs/run")) == 4, "it was not killed in the push of step 5"
    train(tmp_path, file, "run.steps=8", by)
    learnt_once(tmp_path / "runs/run", 8)


@pytest.mark.slow
def test_engines_that_are_killed_while_they_are_paused_and_in_a_push_cost_no_prompt(
    tiny_models: TinyModels, sglang_engine: Engine, tmp_path: Path
) -> None:
    """With long responses under way; the run's own SGLang."""
    behind = {"overlap": "bounded", "max_staleness": 2}
    file = config(tmp_path, tiny_models("llama"), **behind, sampling={"max_new_tokens": 100})
    calls = [{"call": "begin_weight_update", "nth": 3}, {"call": "end_weight_update", "nth": 6}]
    with Held(tmp_path, file, "run.steps=8", "actor.parallel.tensor=1", calls=calls) as run:
        for number in range(len(calls)):
            run.wait_until_held(number)
            os.kill(run.pid_of("sglang.launch_server"), signal.SIGKILL)
            run.release_resources(number)
        assert run.wait(RUN_S) == 0, run.terminal[-6000:]
        assert run.left_running() == {}
    assert "starting it again (restart 2 of 3" in run.terminal and "Traceback" not in run.terminal, run.terminal
    learnt_once(tmp_path / "runs/run", 8)
    assert sum(row.get("rollout/engine_restarts", 0) for row in results(tmp_path / "runs/run").values()) == 2


def test_an_engine_that_dies_is_for_the_main_thread_to_begin_anew(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "light", EngineKind("tests.helpers.light_engine:light_launch"))
    notes, given_to = list[str](), list[str]()
    cfg = RolloutConfig.model_validate({"engine": "light"})
    with start_engine(cfg, str(tiny_models("llama")), "float32", tmp_path) as engine:
        engine.wait_ready()
        engine.restarts.allow(notes.append, given_to.append)
        engine.is_pushing("0")
        [process] = engine.pool.processes
        os.killpg(os.getpgid(process.pid), signal.SIGKILL)
        with pytest.raises(ServerLost, match="engine died") as lost:
            engine.follow(RequestQueue(), SamplingParams(), nothing)
        assert notes == [], "the thread has looked after it"
        assert engine.replace(lost.value) == [*engine.urls] and engine.lacks_weights and given_to == []
        assert engine.replace(lost.value) == [], "it was begun anew twice"
        engine.has_pushed("0")
        queue, found = RequestQueue(), list[Sample]()
        queue.put([request(0, member) for member in range(MEMBERS)])
        queue.end()
        engine.follow(queue, SamplingParams(), found.extend)
    assert [sample.token_weight_versions.tolist() for sample in found if sample.token_weight_versions is not None] == [
        [0, 0]
    ] * MEMBERS
    assert len(notes) == 1 and "starting it again (restart 1 of 3" in notes[0]


def test_an_engine_that_was_begun_anew_in_a_push_is_asked_nothing_before_it_has_weights(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "light", EngineKind("tests.helpers.light_engine:light_launch"))
    cfg, asked = RolloutConfig.model_validate({"engine": "light"}), [request(0, 0)]
    sampling = SamplingParams(max_new_tokens=4)
    with start_engine(cfg, str(tiny_models("llama")), "float32", tmp_path) as engine:
        engine.wait_ready()
        engine.restarts.allow(nothing, nothing)
        engine.is_pushing("0")
        [process] = engine.pool.processes
        os.killpg(os.getpgid(process.pid), signal.SIGKILL)
        assert engine.revive(EngineError(engine.urls[0], "begin_weight_update", None, "gone"))
        with pytest.raises(ServerLost, match="lacks its weights") as lost:
            engine.generate(asked, sampling, over_pushes=True)
        assert engine.replace(lost.value) == [] and engine.restarts.made == 1, "it was begun anew twice"
        engine.has_pushed("0")
        assert len(engine.generate(asked, sampling, over_pushes=True)) == 1


def nothing(samples: list[Sample]) -> None:
    pass
