"""An engine that refuses, fails, hangs or dies during a weight sync: one error on every rank, in bounded time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.slow import slow_cases
from tests.helpers.world import run_world

pytestmark = pytest.mark.long

WORLDS = Path(__file__).parents[2] / "worlds"
TIMEOUT_S = 8.0
SLACK_S = 30.0  # time for a busy machine, and to close sessions on an engine that does not answer

# name -> (behaviour of the engine, transport, error)
FAILURES = {
    "refuses the session, group": ("refuses_begin", "distributed", "/begin_weight_update: .*session is already open"),
    "refuses the group": ("refuses_group", "distributed", "/init_weights_update_group: .*no group for you"),
    "answers 500": ("error_500", "shared_memory", "/update_weights_from_tensor: HTTP 500: .*out of memory"),
    "never joins the group": ("ok", "distributed", "joining process group mrl-sync-.*it responded, but did not join"),
    "dies": ("dies", "shared_memory", "/update_weights_from_tensor: no answer"),
    "hangs": ("hangs", "http", r"/update_weights_from_tensor: no answer: .* after [0-9.]+ s"),
    "keeps its cache": ("busy", "shared_memory", r"/flush_cache.*: HTTP 400: .*requests are running"),
    "is not there": ("none", "http", "/begin_weight_update: no answer"),
    **dict(
        slow_cases(
            (
                "refuses the session",
                ("refuses_begin", "shared_memory", "/begin_weight_update: .*session is already open"),
            ),
            (
                "answers 500, by value",
                ("error_500", "http", "/update_weights_from_tensor: HTTP 500: .*out of memory"),
            ),
        )
    ),
}
# two engines on two nodes: their behaviours, error
OVER_NODES = {
    "node 1 answers 500": (("ok", "error_500"), r"rank 0: .*HTTP 500.*out of memory|rank 0, 1: |rank 1: "),
    "node 1 dies": (("ok", "dies"), "node 1: .*no answer|/update_weights_from_tensor: no answer"),
    "both nodes work": (("ok", "ok"), "^$"),
    **dict(
        slow_cases(
            ("node 0 answers 500", (("error_500", "ok"), "node 0: .*out of memory|out of memory")),
            ("node 1 hangs", (("ok", "hangs"), r"node 1: |no answer: .* after [0-9.]+ s")),
        )
    ),
}
# an engine over two nodes: its behaviour, the node without room, error
SPANNING = {
    "the engine answers 500": ("error_500", None, "/update_weights_from_tensor: HTTP 500: .*out of memory"),
    "node 1 has no room": ("ok", 1, "node 1: no room"),
    "all parts work": ("ok", None, "^$"),
    **dict(
        slow_cases(
            ("the engine dies", ("dies", None, "/update_weights_from_tensor: no answer")),
            ("the engine hangs", ("hangs", None, r"/update_weights_from_tensor: no answer: .* after [0-9.]+ s")),
            ("node 0 has no room", ("ok", 0, "node 0: no room")),
        )
    ),
}
GOOD = {
    "works": ("ok", "shared_memory"),
    "works without sessions": ("no_session", "shared_memory"),
    "is busy for a moment": ("busy_at_first", "shared_memory"),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Starts a fake engine for every case; returns its URL by case."""
    root = tmp_path_factory.mktemp("engines")
    processes, urls = [], {}
    behaviours = {name: case[0] for name, case in (FAILURES | GOOD | SPANNING).items()}
    behaviours |= {f"{name} {node}": case[0][node] for name, case in OVER_NODES.items() for node in (0, 1)}
    for i, behaviour in enumerate(behaviours.values()):
        if behaviour != "none":
            processes.append(
                subprocess.Popen([sys.executable, "-S", str(WORLDS / "fake_engine.py"), str(root / f"{i}"), behaviour])
            )
    try:
        for i, (name, behaviour) in enumerate(behaviours.items()):
            urls[name] = "http://127.0.0.1:1" if behaviour == "none" else f"http://127.0.0.1:{_port(root / f'{i}')}"
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.wait(60)


def _port(file: Path) -> str:
    for _ in range(600):
        if file.exists():
            return file.read_text()
        time.sleep(0.1)
    raise AssertionError(f"{file} was not written within 60 s")


@pytest.fixture(scope="module")
def outcomes(engines: dict[str, str], tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("world")
    jobs = [
        {"name": name, "urls": [engines[name]], "transport": case[1], "timeout_s": TIMEOUT_S}
        for name, case in (FAILURES | GOOD).items()
    ]
    both = {name: [engines[f"{name} {node}"] for node in (0, 1)] for name in OVER_NODES}
    jobs += [{"name": name, "urls": urls, "transport": "auto", "timeout_s": TIMEOUT_S} for name, urls in both.items()]
    jobs += [
        {
            "name": name,
            "urls": [engines[name]],
            "transport": "auto",
            "timeout_s": TIMEOUT_S,
            "spans": True,
            "lacks": case[1],
        }
        for name, case in SPANNING.items()
    ]
    (out / "jobs.json").write_text(json.dumps(jobs))
    run_world(2, "sync_failures.py", out / "jobs.json", out / "results.json", tiny_models("llama"), timeout_s=200)
    return json.loads((out / "results.json").read_text())


@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_engine_is_one_error_on_every_rank_in_bounded_time(name: str, outcomes: dict[str, Any]) -> None:
    first, second = outcomes[name]
    assert first["error"] == second["error"]
    assert re.search(FAILURES[name][2], first["error"]), first["error"]
    assert first["error"].startswith("weight sync to version 7: ")
    assert max(first["seconds"], second["seconds"]) < TIMEOUT_S + SLACK_S


@pytest.mark.parametrize("name", OVER_NODES)
def test_of_engines_on_two_nodes_too(name: str, outcomes: dict[str, Any]) -> None:
    first, second = outcomes[name]
    assert first["error"] == second["error"]
    assert re.search(OVER_NODES[name][1], first["error"]), first["error"]
    assert max(first["seconds"], second["seconds"]) < TIMEOUT_S + SLACK_S


@pytest.mark.parametrize("name", SPANNING)
def test_of_an_engine_over_two_nodes_too(name: str, outcomes: dict[str, Any]) -> None:
    first, second = outcomes[name]
    assert first["error"] == second["error"]
    assert re.search(SPANNING[name][2], first["error"]), first["error"]
    assert max(first["seconds"], second["seconds"]) < TIMEOUT_S + SLACK_S


def test_a_request_has_a_handle_for_every_part(engines: dict[str, str], outcomes: dict[str, Any]) -> None:
    buckets = sum(outcome["buckets"] for outcome in outcomes["all parts work"])
    said = httpx.get(engines["all parts work"] + "/calls", trust_env=False).json()
    assert said["handles"] == [2] * buckets


def test_every_bucket_reaches_both_nodes(engines: dict[str, str], outcomes: dict[str, Any]) -> None:
    buckets = sum(outcome["buckets"] for outcome in outcomes["both nodes work"])
    for node in (0, 1):
        assert calls(engines, f"both nodes work {node}").count("update_weights_from_tensor") == buckets


SAID_NO = ["refuses the session, group", "never joins the group", *slow_cases("refuses the session")]


@pytest.mark.parametrize("name", SAID_NO)
def test_an_engine_that_says_no_is_not_waited_for(name: str, outcomes: dict[str, Any]) -> None:
    assert max(outcome["seconds"] for outcome in outcomes[name]) < TIMEOUT_S


def calls(engines: dict[str, str], name: str) -> list[str]:
    return httpx.get(engines[name] + "/calls", trust_env=False).json()["calls"]


@pytest.mark.parametrize("name", GOOD)
def test_a_push_flushes_the_cache_and_names_the_version_after_the_last_bucket(
    name: str, engines: dict[str, str], outcomes: dict[str, Any]
) -> None:
    assert [outcome["error"] for outcome in outcomes[name]] == ["", ""]
    buckets = sum(outcome["buckets"] for outcome in outcomes[name])
    assert min(outcome["buckets"] for outcome in outcomes[name]) > 1
    end = [] if name == "works without sessions" else ["end_weight_update"]
    flushes = ["flush_cache"] * (3 if name == "is busy for a moment" else 1)
    expected = ["begin_weight_update", *["update_weights_from_tensor"] * buckets, *end, *flushes]
    assert calls(engines, name) == [*expected, "update_weight_version"]


def test_a_refused_session_is_followed_by_no_update(engines: dict[str, str], outcomes: dict[str, Any]) -> None:
    assert calls(engines, "refuses the session, group") == ["begin_weight_update"]


def test_after_a_failure_the_session_is_closed(engines: dict[str, str], outcomes: dict[str, Any]) -> None:
    assert calls(engines, "answers 500")[-1] == "end_weight_update"
