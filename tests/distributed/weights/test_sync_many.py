"""Weight sync from two senders to several engines, a gloo group per sender, while engines join, fail and leave."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.receiving_engine import KEY, ReceivingEngine
from tests.helpers.world import run_world

TIMEOUT_S = 30.0  # of a sync; the world's script uses the same
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(scope="module")
def engines() -> Any:
    made = [ReceivingEngine() for _ in range(4)]
    yield made
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def steps(engines: list[ReceivingEngine], tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("world") / "results.json"
    urls = " ".join(engine.url for engine in engines)
    run_world(2, "sync_many.py", urls, KEY, tiny_models("llama"), out, timeout_s=300)
    return json.loads(out.read_text())


# step -> its engines
GOOD = {
    "first": (0, 1, 2),
    "same group": (0, 1, 2),
    "after it": (0, 1, 2),
    "one alone": (0,),
    "all again": (0, 1, 2),
    "one more": (0, 1, 2, 3),
    "without it": (0, 1, 3),
}


@pytest.mark.parametrize("step", GOOD)
def test_every_engine_has_what_both_senders_sent(
    step: str, steps: dict[str, Any], engines: list[ReceivingEngine]
) -> None:
    found, others = steps[step], {0, 1, 2, 3} - {*GOOD[step]}
    assert found["error"] == "" and steps["buckets"] > 4
    assert all(found[engines[i].url]["digest"] == found["sent"] for i in GOOD[step])
    present = [found[engines[i].url]["digest"] for i in others if engines[i].url in found]
    assert found["sent"] not in present


def test_groups_are_kept_and_made_anew_for_other_engines(steps: dict[str, Any], engines: list[ReceivingEngine]) -> None:
    def joined(step: str, engine: int) -> int:
        return steps[step][engines[engine].url]["joined"]

    senders = 2
    assert [joined("first", i) for i in range(4)] == [senders, senders, senders, 0]
    assert [joined("same group", i) for i in range(4)] == [senders, senders, senders, 0]
    assert [joined("after it", i) for i in range(4)] == [2 * senders, 2 * senders, 2 * senders, 0]
    assert [joined("one alone", i) for i in range(4)] == [3 * senders, 2 * senders, 2 * senders, 0]
    assert [joined("one more", i) for i in range(4)] == [5 * senders, 4 * senders, 4 * senders, senders]
    assert [len(engine.groups) for engine in engines] == [0, 0, 0, 0], "they are left at the end"


@pytest.mark.parametrize(
    ("step", "engine", "problem"),
    [("refuses", 1, "HTTP 400: out of memory"), ("dies", 2, "update_weights_from_distributed: no answer")],
)
def test_the_engine_at_fault_is_named_and_no_other(
    step: str, engine: int, problem: str, steps: dict[str, Any], engines: list[ReceivingEngine]
) -> None:
    error = steps[step]["error"]
    assert f"engine {engines[engine].url}" in error and problem in error
    assert not [other.url for other in engines if other is not engines[engine] and other.url in error]
    assert steps[step]["seconds"] < TIMEOUT_S
