"""Groups that a step trains on, greedy baselines and components of rewards, with a simulated engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mrl.config.schema import FilterGroupsConfig, RLConfig
from mrl.core import Prompt, Request, Rollout, Sample
from mrl.observe.files import read_jsonl
from mrl.reward.errors import RewardError
from mrl.sampling.dynamic_sampling import GroupFilter, SamplingError, in_order
from mrl.trainers.rl.generate import Generator
from tests.helpers.simulated import SimulatedEngine

FILTER = """
def at_least_one_right(group):
    return any(sample["score"] == 1 for sample in group)

def confused(group):
    return len(group)

def broken(group):
    return group[0]["row"]["nothing"]
"""


def sample(row: int, score: float, number: int = 0, **parts: float) -> Sample:
    prompt = Prompt(row, (3, 4), {"prompt": f"p{row}"}, f"p{row}")
    return Sample(Request(number, 0, prompt, 0), [5], [-1.0], "stop", "0", f"r{number}", score, parts)


def groups_of(*scores: tuple[float, ...]) -> list[list[Sample]]:
    return [[sample(row, score, k) for k, score in enumerate(group)] for row, group in enumerate(scores)]


def filtered(**settings: Any) -> tuple[FilterGroupsConfig, GroupFilter]:
    cfg = FilterGroupsConfig(**{"enable": True, **settings})
    return cfg, GroupFilter(cfg)


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "filters.py").write_text(FILTER)
    return str(tmp_path / "filters.py")


def test_a_component_of_the_reward_may_decide() -> None:
    group = [sample(0, 1.0, 0, acc=0.0), sample(0, 0.5, 1, acc=0.0)]
    assert filtered(metric="acc")[1](group) == "equal"
    assert filtered()[1](group) == "kept"
    with pytest.raises(ValueError, match=r"sample 0 \(row 0\).*no component 'form' .*filter_groups.metric.*score, acc"):
        filtered(metric="form")[1](group)


def test_a_users_function_may_refuse_groups(functions: str) -> None:
    judge = filtered(function=f"{functions}:at_least_one_right")[1]
    assert [judge(group) for group in groups_of((0, 0.5), (0, 1), (1, 1))] == ["refused", "kept", "equal"]
    alone = filtered(enable=False, function=f"{functions}:at_least_one_right")[1]
    assert alone(groups_of((1, 1))[0]) == "kept"


@pytest.mark.parametrize(("name", "says"), [("confused", "must return True or False, got 2"), ("broken", "KeyError")])
def test_a_filter_that_fails_is_named_with_the_group(functions: str, name: str, says: str) -> None:
    with pytest.raises(SamplingError, match=rf"filter_groups.function .*{name}.*row 0 \(prompt 'p0'\).*{says}"):
        filtered(function=f"{functions}:{name}")[1](groups_of((0, 1))[0])


def test_a_filter_that_is_not_there_is_named(functions: str) -> None:
    with pytest.raises(RewardError, match=r"algorithm\.filter_groups\.function .*defines no 'keep'"):
        filtered(function=f"{functions}:keep")


def test_samples_are_numbered_anew() -> None:
    samples = in_order(groups_of((0, 1), (2, 3)))
    assert [(s.request.sample_id, s.request.group, s.score) for s in samples] == [
        (0, 0, 0), (1, 0, 1), (2, 1, 2), (3, 1, 3)
    ]  # fmt: skip


class MadeUp(SimulatedEngine):
    """Engine, rewards, tokenizer and data in one object. The score of a response is its seed's lowest bit; half of the
    prompts give equal scores."""

    eos_id = 2

    def __init__(self) -> None:
        super().__init__(lambda request, params: Sample(request, np.array([5, 2]), np.array([-1.0, -2.0]), "stop", "0"))

    def decode_all(self, responses: Sequence[Sequence[int]]) -> list[str]:
        return [str(ids) for ids in responses]

    def submit(self, sample: Sample) -> None:
        request = sample.request
        sample.score = float(request.prompt.index) if request.prompt.index % 2 else request.seed % 2 + 0.5
        sample.score_parts = {"acc": sample.score * 2}

    def collect(self, samples: list[Sample]) -> None:
        assert all(s.score_parts for s in samples)

    def prompts_for_step(self, step: int, n: int, seed: int) -> list[Prompt]:
        g = torch.Generator().manual_seed(seed % (1 << 60) + step)
        return [Prompt(int(row), (3, 4), {}, f"p{row}") for row in torch.randint(100, (n,), generator=g)]


def make(folder: Path, algorithm: dict[str, Any], **batch: int) -> tuple[Generator, MadeUp]:
    cfg = RLConfig.model_validate({
        "trainer": "rl", "run": {"name": "r"}, "model": {"path": "-"}, "data": {"train": "-"},
        "reward": {"function": "exact_match"}, "rollout": {"sampling": {"top_k": 7, "top_p": 0.9}},
        "batch": {"prompts_per_step": 6, "samples_per_prompt": 3, **batch}, "algorithm": algorithm,
    })  # fmt: skip
    (folder / "rollouts").mkdir(exist_ok=True)
    all_in_one = MadeUp()
    parts: Any = all_in_one
    generator = Generator(cfg, folder, parts, parts, print, parts, parts, None)
    generator.open_scheduler(SimpleNamespace(most_s=1.0, left_s=lambda since: 1.0))
    return generator, all_in_one


def drawn(generator: Generator, step: int) -> tuple[Rollout, dict[str, float]]:
    """Runs a step, which also writes its samples, and returns the rollout and the metrics."""
    return generator.step(step)


DAPO: dict[str, Any] = {"adv_estimator": "grpo", "filter_groups": {"enable": True, "max_num_gen_batches": 50}}


def test_a_step_of_dynamic_sampling_depends_on_seed_and_step_alone(tmp_path: Path) -> None:
    generator, made_up = make(tmp_path, DAPO)
    rollout, metrics = drawn(generator, 3)
    assert len(made_up.asked) >= 3 * metrics["sampling/prompts"] > 18
    assert rollout.group.tolist() == [g for g in range(6) for _ in range(3)]
    spread = rollout.scores.view(6, 3)
    assert bool((spread.amax(1) > spread.amin(1)).all())
    assert rollout.rows is not None and not bool((rollout.rows % 2).any())

    seeds = [request.seed for request, _ in made_up.asked]
    assert len(set(seeds)) == len(seeds), "two samples of a step draw the same random numbers"
    prompts = [request.prompt.index for request, _ in made_up.asked][::3]
    assert prompts[:6] != prompts[6:12], "groups in place of dropped ones have the same prompts"
    drawn(generator, 4)
    again, _ = drawn(make(tmp_path, DAPO)[0], 3)
    assert torch.equal(again.scores, rollout.scores) and torch.equal(again.rows, rollout.rows)  # type: ignore[arg-type]


def test_without_filters_no_group_is_replaced(tmp_path: Path) -> None:
    generator, made_up = make(tmp_path, {"adv_estimator": "grpo"})
    rollout, metrics = drawn(generator, 0)
    assert len(made_up.asked) == rollout.num_samples == 18
    assert not any(name.startswith("sampling/") for name in metrics)


def test_more_groups_may_begin_than_a_step_needs(tmp_path: Path) -> None:
    groups = DAPO["filter_groups"] | {"prompts_per_round": 40}
    generator, made_up = make(tmp_path, DAPO | {"filter_groups": groups})
    rollout, metrics = drawn(generator, 0)
    assert len(made_up.asked) >= 120 and rollout.num_samples == 18 and metrics["sampling/prompts"] <= 40


def test_remax_samples_one_greedy_response_a_prompt_that_is_kept(tmp_path: Path) -> None:
    generator, made_up = make(tmp_path, {"adv_estimator": "remax"}, samples_per_prompt=2)
    rollout, metrics = drawn(generator, 0)
    sampled, greedy = made_up.asked[:12], made_up.asked[12:]
    assert {(params.temperature, params.top_k, params.top_p) for _, params in greedy} == {(0, -1, 1)}
    assert {params.temperature for _, params in sampled} == {1}
    assert [request.prompt for request, _ in greedy] == [request.prompt for request, _ in sampled[::2]]
    by_id = {row["sample_id"]: row for row in read_jsonl(tmp_path / "rollouts/step_1.jsonl")}
    wanted = [by_id[12 + group]["score"] for group in rollout.group.tolist()]
    assert rollout.greedy_scores is not None and rollout.greedy_scores.tolist() == wanted
    assert metrics["sampling/greedy_reward_mean"] == pytest.approx(sum(wanted) / 12)
    assert rollout.num_samples == 12, "greedy responses are trained on"


def test_gdpo_takes_the_components_that_are_asked_for(tmp_path: Path) -> None:
    algorithm = {"adv_estimator": "gdpo", "gdpo_reward_keys": ("acc", "score")}
    rollout, _ = drawn(make(tmp_path, algorithm)[0], 0)
    assert rollout.score_parts is not None
    assert torch.equal(rollout.score_parts, torch.stack([2 * rollout.scores, rollout.scores], 1))
    generator, _ = make(tmp_path, algorithm | {"gdpo_reward_keys": ("form",)})
    with pytest.raises(ValueError, match=r"sample 0 .*no component 'form' \(algorithm.gdpo_reward_keys\)"):
        drawn(generator, 0)
