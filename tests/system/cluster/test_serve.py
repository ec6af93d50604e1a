"""Engines on their own nodes, as a user starts them: two `mrl serve` on this machine act as two nodes, and a run loses
a node, gets it back, and is resumed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from mrl.inference.access import Access
from mrl.inference.client import EngineClient
from mrl.inference.membership import NodeRecord, RouterClient, engines_folder, engines_key, router_file
from mrl.resilience.protocol import EXIT_PREEMPTED
from tests.conftest import TinyModels
from tests.helpers.runs import results, samples
from tests.helpers.slow import RUN_SLOW
from tests.helpers.train_tools import Train, write_config

pytestmark = pytest.mark.longest

LIMIT_S = 240.0
COMPARED = 8 if RUN_SLOW else 4  # steps of the undisturbed run, which is slow
PLACEMENT = {"mode": "disaggregated", "nodes": 2, "wait_s": 120.0, "silence_s": 5.0, "away_s": 120.0}
RUN: dict[str, Any] = {
    "actor": {"optimizer": {"lr": 5e-3}, "parallel": {"pipeline": 2}},
    "rollout": {"engine": "transformers"},
    "sync": {"verify": "checksum", "timeout_s": 60.0},
}


class Serve(Train):
    """A process of `mrl serve`, like `Train` for `mrl train`."""

    command = "serve"


def last_row(run_dir: Path) -> dict[str, Any]:
    """Returns the last complete row of the metrics."""
    file = run_dir / "metrics.jsonl"
    whole, _, _ = file.read_text().rpartition("\n") if file.exists() else ("", "", "")
    return json.loads(whole.splitlines()[-1]) if whole else {}


def steps_made(run_dir: Path) -> int:
    return int(last_row(run_dir).get("step", 0))


def engines_of(run_dir: Path) -> float:
    return float(last_row(run_dir)["rollout/engines"])


def wait_for(happens: Callable[[], object], *runs: Train) -> None:
    end = time.monotonic() + LIMIT_S
    while not happens():
        assert time.monotonic() < end, "\n".join(run.terminal[-3000:] for run in runs)
        time.sleep(0.05)


def registered(run_dir: Path) -> dict[int, NodeRecord]:
    """Returns the records of the healthy nodes by number."""
    with contextlib.closing(RouterClient(router_file(run_dir))) as client:
        return {node.record.engines.node: node.record for node in client.nodes() if node.healthy}


def checksums(run_dir: Path, record: NodeRecord) -> tuple[str, Any]:
    """Returns (version, checksums) of the engine of a node."""
    with contextlib.closing(EngineClient(record.engines.urls[0], 60.0, Access(engines_key(run_dir)))) as client:
        return client.model_info().weight_version, client.weights_checksum()


@dataclass
class Story:
    """The events of the run, for the tests to check. said: terminal output by process"""

    run_dir: Path
    said: dict[str, str] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    left: dict[str, dict[int, str]] = field(default_factory=dict)
    answers: list[int] = field(default_factory=list)
    modes: set[int] = field(default_factory=set)
    records: dict[int, NodeRecord] = field(default_factory=dict)
    held: list[tuple[str, Any]] = field(default_factory=list)
    fewest: float = 0.0


def begin(serves: dict[int, Serve], folder: Path, config: Path, *numbers: int) -> None:
    for number in numbers:
        serves[number] = Serve(folder, config, f"--node={number}", "--head=127.0.0.1")


@pytest.fixture(scope="module")
def story(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("serve")
    sections = RUN | {"run": {"steps": 100000}, "checkpoint": {"every_steps": 20}, "placement": PLACEMENT}
    config = write_config(folder, tiny_models("llama"), **sections)
    story, serves = Story(folder / "runs" / "run"), dict[int, Serve]()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [serve.__exit__() for serve in serves.values()])
        begin(serves, folder, config, 0, 1)
        with Train(folder, config) as train:
            lose_one_and_take_it_back(story, folder, config, serves, train)
        story.held = [checksums(story.run_dir, story.records[number]) for number in range(2)]
        last = steps_made(story.run_dir)
        with Train(folder, config, f"run.steps={last + 3}") as train:
            story.codes["second run"] = train.wait(LIMIT_S)
            story.said["second run"] = train.terminal
        for number, serve in serves.items():
            story.codes[f"node {number}"] = serve.wait(LIMIT_S)
            story.left[f"node {number}"] = serve.left_running()
            story.said[f"node {number}"] = serve.terminal
        yield story


def lose_one_and_take_it_back(story: Story, folder: Path, config: Path, serves: dict[int, Serve], train: Train) -> None:
    run_dir = story.run_dir
    wait_for(lambda: steps_made(run_dir) >= 2, train, *serves.values())
    folder_of_engines = engines_folder(run_dir)
    story.modes = {stat.S_IMODE(file.stat().st_mode) for file in folder_of_engines.glob("*.json")}
    story.modes.add(stat.S_IMODE((folder_of_engines / "key").stat().st_mode))
    engines = registered(run_dir)[0].engines
    for url in (engines.urls[0] + "/model_info", engines.agent + "/ended"):
        story.answers.append(httpx.post(url, json={}, headers=Access("no").headers, trust_env=False).status_code)
    with Serve(folder, config, "--node=0", "--head=127.0.0.1") as again:
        story.codes["again"], story.said["again"] = again.wait(LIMIT_S), again.terminal
    stale = registered(run_dir)[1]
    serves[1].processes()
    serves[1].signal(signal.SIGKILL)
    serves[1].wait(30)
    with contextlib.closing(RouterClient(router_file(run_dir))) as client:
        client.register(replace(stale, engines=replace(stale.engines, node=5)), None)
    story.left["killed"] = serves[1].left_running()
    wait_for(lambda: engines_of(run_dir) == 1, train)
    story.fewest = engines_of(run_dir)
    begin(serves, folder, config, 1)
    wait_for(lambda: engines_of(run_dir) == 2, train, serves[1])
    enough = max(steps_made(run_dir) + 2, COMPARED)
    wait_for(lambda: steps_made(run_dir) >= enough, train)
    story.records = registered(run_dir)
    train.signal(signal.SIGTERM)
    story.codes["first run"], story.said["first run"] = train.wait(LIMIT_S), train.terminal


def test_a_run_goes_on_without_a_node_and_takes_it_back(story: Story) -> None:
    said = story.said["first run"]
    assert story.fewest == 1 and story.codes["first run"] == EXIT_PREEMPTED, said[-3000:]
    assert "engine 1 on node 1" in said and "has left" in said
    assert said.count("has come: engine 1") == 2 and said.count("has come: engine 0") == 1
    assert "node 5" not in said, "its agent does not answer"


def test_all_engines_have_the_same_weights_then(story: Story) -> None:
    (version, first), (other, second) = story.held
    assert version == other != "default"
    assert first == second and first[0].checksums


@pytest.mark.slow
def test_metrics_and_samples_are_those_of_engines_on_the_trainer_s_node(
    story: Story, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Neither the loss of a node nor the number of engines changes metrics and samples."""
    config = write_config(tmp_path, tiny_models("llama"), **(RUN | {"run": {"steps": COMPARED}}))
    with Train(tmp_path, config) as train:
        assert train.wait(LIMIT_S) == 0, train.terminal[-3000:]
    run_dir = tmp_path / "runs" / "run"
    apart = ("rollout/engine", "sync/", "mismatch/")  # an engine's rounding depends on the rest of the batch

    def learnt(folder: Path) -> list[dict[str, float]]:
        rows = results(folder)
        steps = range(1, COMPARED + 1)
        return [{k: v for k, v in rows[step].items() if not k.startswith(apart)} for step in steps]

    assert learnt(run_dir) == learnt(story.run_dir)
    ours, theirs = samples(run_dir), samples(story.run_dir)
    assert ours and {name: theirs[name] for name in ours} == ours


def test_a_run_that_is_started_again_finds_its_engines(story: Story) -> None:
    assert story.codes["second run"] == 0, story.said["second run"][-3000:]
    assert "2 engines have the weights of step" in story.said["second run"]


@pytest.mark.slow
def test_responses_go_on_over_pushes_to_engines_of_other_nodes(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Responses on other nodes' engines continue across weight syncs with the `distributed` transport."""
    behind = {"engine": "sglang", "interrupt": "at_sync", "max_staleness": 2}
    sections = RUN | {
        "run": {"steps": 5},
        "actor": {"optimizer": {"lr": 2e-4}, "parallel": {"pipeline": 2}},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "samples_per_minibatch": 4},
        "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}},
        "placement": PLACEMENT | {"nodes": 1},
        "rollout": behind | {"sampling": {"max_new_tokens": 24}},
    }
    config, serves = write_config(tmp_path, tiny_models("llama"), **sections), dict[int, Serve]()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [serve.__exit__() for serve in serves.values()])
        begin(serves, tmp_path, config, 0)
        with Train(tmp_path, config) as train:
            assert train.wait(LIMIT_S) == 0, train.terminal[-3000:]
        assert serves[0].wait(LIMIT_S) == 0, serves[0].terminal[-3000:]
    rows = results(tmp_path / "runs" / "run")
    assert sorted(rows) == [1, 2, 3, 4, 5]
    assert 0 < max(row["staleness/max"] for row in rows.values()) <= 2
    assert rows[1]["mismatch/age_0"] < 1e-4


def test_nodes_end_with_the_run_s_last_step_and_leave_nothing(story: Story) -> None:
    assert (story.codes["node 0"], story.codes["node 1"]) == (0, 0)
    assert story.left == {"killed": {}, "node 0": {}, "node 1": {}}
    assert not list((story.run_dir / "engines").glob("*.lock"))
    assert "Traceback" not in story.said["node 0"]


def test_strangers_are_refused_and_cannot_read_the_key(story: Story) -> None:
    assert story.answers == [401, 401]
    assert story.modes == {0o600}


def test_a_number_that_is_taken_is_refused(story: Story) -> None:
    assert story.codes["again"] == 1
    assert "another mrl serve is already node 0 of" in story.said["again"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["placement.mode=colocated"], "mrl serve needs placement.mode: disaggregated"),
        (["--node=-1"], "nodes are numbered from 0"),
        (["placement.nodes_per_engine=2"], "runs on one device"),
        (["rollout.servers=70"], "the maximum is 64"),
    ],
)
def test_what_cannot_be_served_is_refused(
    arguments: list[str], problem: str, tiny_models: TinyModels, tmp_path: Path
) -> None:
    config = write_config(tmp_path, tiny_models("llama"), **(RUN | {"placement": {"mode": "disaggregated"}}))
    with Serve(tmp_path, config, *arguments) as serve:
        assert serve.wait(60) == 2
        assert problem in serve.terminal


@pytest.mark.slow
def test_a_run_whose_nodes_do_not_come_says_what_is_there(tiny_models: TinyModels, tmp_path: Path) -> None:
    sections = RUN | {"placement": PLACEMENT | {"wait_s": 2.0, "nodes": 1}}
    config = write_config(tmp_path, tiny_models("llama"), **sections)
    with Train(tmp_path, config) as train:
        assert train.wait(120) == 1
        assert "0 of 1 engine nodes (placement.nodes) are ready after placement.wait_s = 2 s" in train.terminal
        assert "no node has ever been there" in train.terminal


def test_an_sglang_engine_over_two_nodes_gets_its_weights_by_broadcast(tiny_models: TinyModels, tmp_path: Path) -> None:
    """An SGLang engine with one tensor-parallel rank on each node receives broadcasts of both senders. Each sync is
    verified on both nodes."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs sglang")
    placement = PLACEMENT | {"nodes_per_engine": 2}
    sections = RUN | {"run": {"steps": 3}, "rollout": {"engine": "sglang", "tensor": 2}, "placement": placement}
    config = write_config(tmp_path, tiny_models("llama"), **sections)
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(Serve(tmp_path, config, f"--node={n}", "--head=127.0.0.1")) for n in range(2)]
        with Train(tmp_path, config) as train:
            assert train.wait(LIMIT_S) == 0, train.terminal[-3000:]
        assert [node.wait(LIMIT_S) for node in nodes] == [0, 0]
        assert [node.left_running() for node in nodes] == [{}, {}]
    rows = results(tmp_path / "runs" / "run")
    assert [row["rollout/engines"] for row in rows.values()] == [1, 1, 1]
    assert "Traceback" not in nodes[0].terminal + nodes[1].terminal
