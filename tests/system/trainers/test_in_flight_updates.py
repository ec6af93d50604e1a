"""Partial rollouts across weight syncs: no sample is too old, each is trained on once and in order, and each token has
its weight version."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.config.engines import ENGINES, EngineKind
from mrl.config.schema import RolloutConfig
from mrl.core import Prompt, Request, Sample, SamplingParams
from mrl.inference.client import EngineClient
from mrl.inference.engine import Engine
from mrl.inference.errors import EngineError
from mrl.inference.seeds import sample_seed
from mrl.inference.start import start_engine
from tests.conftest import TinyModels
from tests.helpers.runs import results, samples, train
from tests.helpers.train_tools import ROOT, Train, given, write_config

pytestmark = pytest.mark.longest

WANTED, MEMBERS, STEPS = 3, 2, 40
WAIT_S, RUN_S = 60.0, 300.0
FAULTS = ROOT / "tests/worlds/faults"
FAR = ("rollout.mismatch={warn: null, stop: null, warn_sample: null, stop_sample: null}",)  # fp8 rounds by more


def prompted(group: int, member: int) -> Request:
    return Request(group * MEMBERS + member, group, Prompt(group, (1, 2), {}), sample_seed(1, group, member))


# ---- real engines


@pytest.mark.parametrize("engine", ["sglang", "transformers"])
def test_each_token_has_the_log_prob_of_the_weights_that_it_names(
    tiny_models: TinyModels, request: pytest.FixtureRequest, tmp_path: Path, engine: str
) -> None:
    """Each token has the log-prob of its weight version, though weights change repeatedly during long responses."""
    weights = [tiny_models("llama"), tiny_models("llama", seed=1)]
    with ExitStack() as stack:
        if engine == "sglang":
            found = exchanged(request.getfixturevalue("sglang_engine"), weights)
        else:
            cfg = RolloutConfig.model_validate({"engine": engine})
            started = stack.enter_context(start_engine(cfg, str(weights[0]), "float32", tmp_path))
            started.wait_ready()
            found = exchanged(started, weights)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in weights]
    mixed = 0
    for sample in found:
        assert sample.token_weight_versions is not None and len(sample.token_weight_versions) == len(
            sample.response_ids
        )
        gaps = [gap(model, sample) for model in models]
        own = sample.token_weight_versions % 2
        assert max(float(gaps[n][own == n].max()) for n in {*own.tolist()}) < 1e-4
        assert max(float(gaps[1 - n][own == n].max()) for n in {*own.tolist()}) > 1e-2
        mixed += len({*own.tolist()}) > 1
    assert mixed, "no response has gone on over a change of weights"


def exchanged(engine: Engine, weights: list[Path]) -> list[Sample]:
    engine.versions |= {str(number) for number in range(1000)}
    dispatcher, version, end = engine.dispatcher, 0, time.monotonic() + WAIT_S
    with closing(engine.pool.client(engine.urls[0])) as client:
        change(client, weights[0], "0")
        asked = [prompted(group, member) for group in range(2) for member in range(MEMBERS)]
        drawing = dispatcher.submit(generated(engine, asked, SamplingParams(max_new_tokens=160)))
        wait([drawing], 0.1)
        while not drawing.done() and time.monotonic() < end:
            version += 1
            paused = dispatcher.pause(interrupt=True)
            dispatcher.serve(lambda: paused.done() and not dispatcher.sent)  # noqa: B023
            change(client, weights[version % 2], str(version))
            dispatcher.resume()
            wait([drawing], 0.1)
        found = drawing.result(WAIT_S)
        change(client, weights[0], "default")
    return found


def change(client: EngineClient, weights: Path, version: str) -> None:
    client.flush_when_idle(WAIT_S)  # a request that has just been answered still counts as running
    client.update_weights_from_disk(str(weights), weight_version=version)


async def generated(engine: Engine, asked: list[Request], sampling: SamplingParams) -> list[Sample]:
    """Returns samples that are generated as in an asynchronous run."""
    how = engine.generation(sampling, is_background=True, is_interruptible=True)
    return await asyncio.gather(*(engine.dispatcher.generate(one, how) for one in asked))


def gap(model: Any, sample: Sample) -> np.ndarray:
    """Returns the differences, [n], between the engine's log-probs and those of one forward pass."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    with torch.no_grad():
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
    found = log_probs.gather(1, ids[1:, None]).flatten()[-len(sample.response_ids) :]
    return np.abs(found.numpy() - sample.log_probs)


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
    """Other combinations of sync transports and training settings work.

    numerics: difference of engine and trainer with the same weights, in nats per token; None: at most that of the first
    step, since a step may have only one token of the newest weights
    """
    behind = {"interrupt": "at_sync", "max_staleness": 1}
    file = config(tmp_path, tiny_models("llama"), **behind, **given(sglang_engine, tmp_path))
    train(tmp_path, file, "run.steps=4", *ways)
    rows = results(tmp_path / "runs/run")
    assert len(rows) >= 4 and all(row["staleness/max"] <= 1 for step, row in rows.items() if step)
    limit = numerics or rows[1]["mismatch/max_abs"]
    assert max(row.get("mismatch/age_0", 0.0) for row in rows.values()) < limit, "a token is of other weights"
    assert numerics is None or rows[4]["mismatch/age_1"] > limit, "nothing was learnt, or nothing was pushed"


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"interrupt": "at_step_end", "oversample": 2.0}, id="partial rollouts"),
        pytest.param({"max_staleness": 2, "order": "first_done"}, id="first done", marks=pytest.mark.slow),
        pytest.param({"max_staleness": 3, "interrupt": "never"}, id="three steps ahead", marks=pytest.mark.slow),
        pytest.param(
            {"max_staleness": 2, "interrupt": "at_sync", "engine": "transformers"},
            id="transformers",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_prompt_is_lost_or_learnt_twice_over_a_resume(
    tiny_models: TinyModels, request: pytest.FixtureRequest, tmp_path: Path, how: dict[str, Any]
) -> None:
    engine = {} if "engine" in how else given(request.getfixturevalue("sglang_engine"), tmp_path)
    file = config(tmp_path, tiny_models("llama"), **how, **engine)
    train(tmp_path, file, "run.steps=4")
    train(tmp_path, file, "run.steps=6")
    rows, drawn = results(tmp_path / "runs/run"), samples(tmp_path / "runs/run")
    learnt = [row["index"] for step in range(1, 7) for row in drawn[f"step_{step}.jsonl"][::2]]
    most = 2 if how.get("interrupt") == "at_step_end" or "order" in how else 1  # some of the next pass may be early
    assert len(learnt) == 24 and max(map(learnt.count, learnt)) <= most
    assert max(row["staleness/max"] for step, row in rows.items() if step) > 0, "no token is of earlier weights"
    assert max(row["staleness/max"] for step, row in rows.items() if step) <= how.get("max_staleness", 6)
    fresh = [row["mismatch/age_0"] for step, row in rows.items() if "mismatch/age_0" in row]
    assert max(fresh) < 1e-4, "a token is not of the weights that it names"


class Held(Train):
    """A run that is held before the given engine calls."""

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
    """Checks that 4 of 24 rows are trained on per step, each once per pass, that no token is too old, and that tokens
    of the newest weights have the trainer's log-probs."""
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
    """No prompt is lost or trained on twice if the trainer is killed in a weight sync and keeps its engine."""
    behind = {"interrupt": "at_sync", "max_staleness": 2}
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
def test_engines_that_are_killed_in_a_weight_sync_cost_no_prompt(
    tiny_models: TinyModels, sglang_engine: Engine, tmp_path: Path
) -> None:
    """The run's own SGLang is killed during weight syncs, with long responses in flight, and no prompt is lost."""
    behind = {"interrupt": "at_sync", "max_staleness": 2}
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


@pytest.fixture
def light_engine(tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setitem(ENGINES, "light", EngineKind("tests.helpers.light_engine:light_launch"))
    cfg = RolloutConfig.model_validate({"engine": "light"})
    with start_engine(cfg, str(tiny_models("llama")), "float32", tmp_path) as engine:
        engine.wait_ready()
        with engine.weight_sync("0"):
            engine.has_synced("0")
        yield engine


def kill(engine: Engine) -> None:
    """Kills the engine and waits until it has ended; until then it may answer."""
    [process] = engine.pool.processes
    os.killpg(os.getpgid(process.pid), signal.SIGKILL)
    while process.exit_code() is None:
        time.sleep(0.01)


def test_a_lost_engine_is_started_again_and_gets_its_weights_from_the_main_thread(light_engine: Engine) -> None:
    """A lost engine is restarted and gets its weights from the main thread, at once or with the next sync of all
    engines. Until then it gets no requests."""
    notes, given_to, main = list[str](), list[str](), threading.current_thread()
    light_engine.pool.restarts.allow(
        lambda line: notes.append(f"{line} {threading.current_thread() is main}"), given_to.append
    )
    dispatcher, asked = light_engine.dispatcher, [prompted(0, member) for member in range(MEMBERS)]
    for is_given in (True, False):
        kill(light_engine)
        drawn = dispatcher.submit(generated(light_engine, asked, SamplingParams(max_new_tokens=4)))
        dispatcher.serve(lambda: bool(dispatcher.awaiting_weights))
        assert not drawn.done() and light_engine.present() == (light_engine.urls, light_engine.urls)
        if is_given:
            dispatcher.serve(drawn.done, light_engine.pool.restarts.give_weights)
        else:
            with light_engine.weight_sync("1"):
                light_engine.has_synced("1")
        assert [s.token_weight_versions.tolist() for s in drawn.result(WAIT_S)] == [[0, 0]] * MEMBERS  # type: ignore[union-attr]
    assert given_to == [*light_engine.urls]
    dispatcher.serve(lambda: len(notes) == 2)
    assert all("starting it again (restart" in note and note.endswith("True") for note in notes)


def test_an_engine_that_a_weight_sync_starts_again_is_asked_nothing_before_it_has_weights(light_engine: Engine) -> None:
    light_engine.pool.restarts.allow(print, print)
    with light_engine.weight_sync("1"):
        kill(light_engine)
        drawn = light_engine.dispatcher.submit(
            generated(light_engine, [prompted(0, 0)], SamplingParams(max_new_tokens=4))
        )
        assert light_engine.pool.revive(EngineError(light_engine.urls[0], "begin_weight_update", None, "gone"))
        assert not wait([drawn], 1.0).done, "it was asked for tokens of the weights of its directory"
        light_engine.has_synced("1")
    assert len(drawn.result(WAIT_S)) == 1 and light_engine.pool.restarts.made == 1, "it was started twice"


def nothing(samples: list[Sample]) -> None:
    pass
