"""The critic learns, PPO learns more with it than without, and clipping limits the second of two updates in a step."""

from __future__ import annotations

import json

import pytest

from tests.helpers.slow import slow_cases
from tests.helpers.tiny import make_tiny
from tests.helpers.world import start_world

pytestmark = pytest.mark.long

SEEDS = (1, *slow_cases(2, 3))
Results = dict[str, dict[str, list[float]]]  # mode -> metric -> value at every step


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    root = tmp_path_factory.mktemp("critic")
    size = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    model = make_tiny(root / "model", "llama", weights=False, initializer_range=0.05, **size)
    files = {seed: root / f"{seed}.json" for seed in SEEDS}
    modes = ("critic", "zero", "minibatches")
    worlds = [start_world(1, "critic.py", model, file, str(seed), *modes) for seed, file in files.items()]
    try:
        for world in worlds:
            output, errors = world.communicate(timeout=600)
            assert world.returncode == 0, output[-2000:] + errors[-6000:]
    finally:
        for world in worlds:
            world.kill()  # its ranks end with it
    return {seed: json.loads(file.read_text()) for seed, file in files.items()}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_critic_learns_to_expect_the_delayed_reward(results: dict[int, Results], seed: int) -> None:
    history = results[seed]["critic"]
    explained = history["critic/explained_variance"]
    assert explained[0] == 0.0  # a new value head is 0
    assert min(explained[-20:]) > 0.9, explained
    assert history["critic/loss"][-1] < 0.1 * history["critic/loss"][0]


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_with_a_critic_beats_ppo_with_a_frozen_zero_one(results: dict[int, Results], seed: int) -> None:
    critic, zero = (results[seed][mode]["solved"] for mode in ("critic", "zero"))
    assert critic[0] == zero[0] < 0.15  # the same initial model; the chance level is 1 in 8
    assert critic[-1] > 0.4 and critic[-1] > zero[-1] + 0.2, (critic[-1], zero[-1])  # 0.62 to 0.74, 0.13 to 0.20
    assert set(results[seed]["zero"]["critic/explained_variance"]) == {0.0}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_second_update_of_a_step_is_clipped_and_learning_goes_on(results: dict[int, Results], seed: int) -> None:
    one, two = results[seed]["critic"], results[seed]["minibatches"]
    assert max(map(abs, one["actor/ppo_kl"])) == max(one["actor/clipfrac"]) == 0.0  # one update: the ratio is 1
    assert sum(kl != 0.0 for kl in two["actor/ppo_kl"]) == len(two["actor/ppo_kl"])
    assert sum(share > 0.0 for share in two["actor/clipfrac"]) > len(two["actor/clipfrac"]) / 2
    assert two["solved"][0] < 0.15 and two["solved"][-1] > 0.6, two["solved"]  # 0.86 to 0.96


@pytest.mark.parametrize("seed", SEEDS)
def test_the_samples_are_of_the_policy_that_learns_from_them(results: dict[int, Results], seed: int) -> None:
    for mode in ("critic", "zero", "minibatches"):
        gap = max(results[seed][mode]["mismatch/max_abs"])
        assert gap < 1e-4, (mode, gap)
