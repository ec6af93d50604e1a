"""Reward managers: which functions score a sample, how scores are combined, and their names in the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.schema import RewardConfig
from mrl.core import Sample
from mrl.reward.errors import RewardError
from mrl.reward.manager import RewardManager, longest_call_s
from tests.system.reward.test_reward_pool import sample

USER_FILE = """
import os, time

def words(prompt, response, row):
    return len(response.split())

def parts(prompt, response, row):
    return {"score": 2.0, "tone": 0.5}

def fails(prompt, response, row):
    raise LookupError("no luck")

calls = 0
def batch(prompts, responses, rows):
    global calls
    calls += 1
    do = rows[0].get("do")
    if do == "short": return [0.0] * (len(prompts) - 1)
    if do == "nan": return [float("nan") if i == 2 else 1.0 for i in range(len(prompts))]
    if do == "number": return 1.0
    if do == "text": return "1" * len(prompts)
    if do == "raise": raise LookupError("no luck")
    if do == "sleep": time.sleep(1000)
    if do == "exit": os._exit(3)
    best = max(map(len, responses))
    return [{"score": len(r) / best, "calls": calls} for r in responses]
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("user") / "rewards.py"
    path.write_text(USER_FILE)
    return str(path)


def open_manager(max_response_tokens: int = 0, **settings: object) -> RewardManager:
    cfg = RewardConfig.model_validate({"workers": 1, **settings})
    return RewardManager(cfg, max_response_tokens=max_response_tokens)


def of(source: str | None, i: int, response: str = "7", tokens: int = 1) -> Sample:
    one = sample(i, response, {} if source is None else {"data_source": source})
    one.response_ids = [5] * tokens
    return one


def test_the_row_s_data_source_chooses_the_function() -> None:
    samples = [of("gsm8k", 0, "so 7.0"), of("quiz", 1, "so 7.0"), of(None, 2, "so 7.0"), of("other", 3, "7")]
    seen: list[object] = []
    with open_manager(functions={"gsm8k": "arithmetic", "quiz": "exact_match"}, function="exact_match") as manager:
        manager.on_scored = seen.append
        manager.collect(samples)
    assert len(seen) == 4, "who waits hears of each score"
    assert [s.score for s in samples] == [1, 0, 0, 1]
    assert [s.score_parts for s in samples] == [
        {"arithmetic": 1},
        {"exact_match": 0},
        {"exact_match": 0},
        {"exact_match": 1},
    ]


@pytest.mark.parametrize(("source", "what"), [("gms8k", "has the data_source 'gms8k'"), (None, "has no data_source")])
def test_a_data_source_that_nothing_scores_is_named(source: str | None, what: str) -> None:
    message = f"sample 4 .*its row {what}, but rewards are set for 'gsm8k', 'quiz' .*data.data_source_key"
    with open_manager(functions={"gsm8k": "arithmetic", "quiz": "exact_match"}) as manager:
        with pytest.raises(RewardError, match=message):
            manager.submit(of(source, 4))


@pytest.mark.parametrize(("tokens", "penalty"), [(1, 0), (60, 0), (61, -0.05), (70, -0.5), (80, -1.0), (100, -2.0)])
def test_dapo_takes_off_for_length(tokens: int, penalty: float) -> None:
    """The length penalty follows the DAPO paper's equation with L_max 80, L_cache 20 and factor 1."""
    one = of(None, 0, "7", tokens)
    overlong = {"buffer_tokens": 20}
    with open_manager(80, manager="dapo", function="exact_match", overlong=overlong) as manager:
        manager.collect([one])
    assert one.score == pytest.approx(1 + penalty)
    assert one.score_parts == pytest.approx({"exact_match": 1.0, "overlong": penalty})


def test_a_recipe_mixes_by_data_source_and_logs_every_component(user: str) -> None:
    samples = [of("chat", 0, "a b c", 4), of("math", 1, "7", 6), of("poem", 2, "7", 10)]
    settings = {
        "recipe": {
            "chat": {f"{user}:words": 0.5, f"{user}:parts": 2.0, "length": -1.0},
            "math": {"exact_match": 1.0, "length": 0.1},
            "*": {"exact_match": 0.0},
        },
        "length": {"full_tokens": 2, "zero_tokens": 10},
    }
    with open_manager(manager="recipe", **settings) as manager:
        manager.collect(samples)
    assert [s.score for s in samples] == pytest.approx([0.5 * 3 + 2.0 * 2 - 0.75, 1 + 0.1 * 0.5, 0.0])
    assert samples[0].score_parts == {"words": 3, "parts": 2, "parts/tone": 0.5, "length": 0.75}
    assert samples[1].score_parts == {"exact_match": 1, "length": 0.5}
    assert samples[2].score_parts == {"exact_match": 1}


def test_a_component_that_fails_costs_the_sample_its_whole_score(user: str) -> None:
    recipe = {"bad": {"exact_match": 1.0, f"{user}:fails": 1.0}, "*": {"exact_match": 1.0}}
    samples = [of("bad", 0), of("good", 1)]
    with open_manager(manager="recipe", recipe=recipe, on_error="zero") as manager:
        manager.collect(samples)
        assert manager.failures == 1
    assert [s.score for s in samples] == [0, 1]
    assert "fails' on sample 0" in samples[0].reward_error and "no luck" in samples[0].reward_error
    assert samples[0].score_parts == {"exact_match": 1} and not samples[1].reward_error
    with open_manager(manager="recipe", recipe=recipe) as manager:
        with pytest.raises(RewardError, match="fails' on sample 0"):
            manager.collect([of("bad", 0), of("good", 1)])


def test_a_batch_function_is_called_once_with_all_samples(user: str) -> None:
    samples = [of(None, i, "x" * (i + 1)) for i in range(100)]
    with open_manager(manager="batch", function=f"{user}:batch") as manager:
        for one in samples[:50]:
            manager.submit(one)
        manager.collect(samples)
        assert [s.score for s in samples] == [(i + 1) / 100 for i in range(100)]
        assert {s.score_parts["calls"] for s in samples} == {1}
        again, later = [of(None, 0, "xx"), of(None, 1, "x")], of(None, 2, "xxxx")
        manager.submit(later)  # a sample of another step, which is scored with that step
        manager.collect(again)
        manager.collect([later])
    assert (later.score, later.score_parts) == (1, {"calls": 3})
    assert [(s.score, s.score_parts) for s in again] == [(1, {"calls": 2}), (0.5, {"calls": 2})]


BATCH_FAULTS = {
    "short": "on a batch of 4 samples, the first of them sample 0 .*raised.*returned 3 scores for 4 samples",
    "number": "on a batch of 4 samples.*must return a list of 4 scores, got float",
    "text": ".*must return a list of 4 scores, got str",
    "nan": r"on sample 2 \(row 102, prompt 'question 2'\) returned no score: ValueError: .*finite, got nan",
    "raise": "on a batch of 4 samples.*LookupError: no luck",
    "exit": r"on a batch of 4 samples.*ended its process \(exit code 3\)",
    "sleep": r"on a batch of 4 samples.*returned nothing within 2 s",
}


@pytest.mark.parametrize("do", BATCH_FAULTS)
def test_a_batch_function_s_faults_are_named(user: str, do: str) -> None:
    samples = [sample(i, row={"do": do}) for i in range(4)]
    with open_manager(manager="batch", function=f"{user}:batch", timeout_s=2.0) as manager:
        with pytest.raises(RewardError, match=f"(?s)rewards.py:batch' {BATCH_FAULTS[do]}"):
            manager.collect(samples)
    if do == "nan":
        with open_manager(manager="batch", function=f"{user}:batch", on_error="zero") as manager:
            manager.collect(samples)
        assert [s.score for s in samples] == [1, 1, 0, 1] and manager.failures == 1


def test_a_batch_in_a_recipe(user: str) -> None:
    samples = [of("a", 0, "xx"), of("b", 1, "x"), of("a", 2, "x")]
    recipe = {"a": {"batch": 1.0}, "*": {"exact_match": 1.0}}
    with open_manager(manager="recipe", recipe=recipe, function=f"{user}:batch") as manager:
        manager.collect(samples)
    assert [s.score for s in samples] == [1, 0, 0.5]
    assert samples[0].score_parts == {"batch": 1, "batch/calls": 1}


def test_a_batch_function_s_signature_is_checked(user: str) -> None:
    with pytest.raises(RewardError, match=r"must take \(prompts, responses, rows\): too many positional"):
        open_manager(manager="batch", function=f"{Path(user).parent}/two.py:two")


@pytest.fixture(autouse=True, scope="module")
def two(user: str) -> None:
    Path(user).with_name("two.py").write_text("def two(prompts, responses): return []\n")


def test_a_call_takes_as_long_as_its_server_with_all_retries() -> None:
    assert longest_call_s(RewardConfig(function="math", timeout_s=10)) == 10
    server = {"url": "http://one:1", "timeout_s": 30.0, "retries": 2, "backoff_s": 1.0}
    assert longest_call_s(RewardConfig(manager="remote", servers={"a": server}, timeout_s=10)) == 30 * 3 + 1 + 2 + 4
