"""The samples of each update of a step, pass by pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl import platform

platform.install()

from mrl.config.schema import MismatchConfig, RLConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.trainers.rl import loop  # noqa: E402
from mrl.trainers.rl.experience import Passes, make_experience  # noqa: E402
from mrl.trainers.rl.mismatch import MismatchError, MismatchLimits  # noqa: E402
from mrl.trainers.rl.run import RLRun  # noqa: E402
from tests.helpers.bare_run import bare_run  # noqa: E402

SAMPLES, EPOCHS = 16, 3


def a_run(shuffle: bool, seed: int = 1) -> RLRun:
    cfg = RLConfig.model_validate(
        {
            **{"trainer": "rl", "run": {"name": "r", "seed": seed}, "model": {"path": "-"}, "data": {"train": "-"}},
            **{"reward": {"function": "exact_match"}, "algorithm": {"adv_estimator": "grpo"}},
            "batch": {"prompts_per_step": 8, "samples_per_prompt": 2, "samples_per_minibatch": 4}
            | {"epochs_per_step": EPOCHS, "shuffle_minibatches": shuffle},
        }
    )
    return bare_run(cfg, SimpleNamespace(total_over_context=None), None)  # type: ignore[arg-type]


def a_rollout(step: int) -> Rollout:
    return Rollout.of(step, [[1]] * SAMPLES, [[2, 3]] * SAMPLES, group=torch.arange(SAMPLES) // 2)


def learnt(monkeypatch: pytest.MonkeyPatch, run: RLRun, step: int) -> list[list[int]]:
    """Returns the samples of each of the step's actor updates, in order."""
    seen: list[list[int]] = []

    def update_actor(run: RLRun, exp: Any, sample_ids: Any, number: int, states: object) -> dict[str, float]:
        assert number == len(seen)
        seen.append([*sample_ids])
        part = exp.part(sample_ids)
        assert torch.equal(part.rollout.group, exp.rollout.group[torch.tensor(seen[-1])])
        return {"skipped": 0.0}

    monkeypatch.setattr(loop, "update_actor", update_actor)
    monkeypatch.setattr(loop, "lm_head_quantization_error", lambda *_: {})
    rollout = a_rollout(step)
    loop.update(run, make_experience(run.cfg.algorithm, rollout, Passes(), 0.0), trains_actor=True)
    return seen


def test_each_pass_has_other_mini_batches_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With shuffling each pass has other mini-batches of all samples. They depend only on seed, step and pass, so a
    resumed run and every layout have the same ones."""
    plain = learnt(monkeypatch, a_run(shuffle=False), 0)
    assert plain == [[*range(i, i + 4)] for i in range(0, SAMPLES, 4)] * EPOCHS
    shuffled = learnt(monkeypatch, a_run(shuffle=True), 0)
    passes = [shuffled[i : i + 4] for i in range(0, len(shuffled), 4)]
    assert len(passes) == EPOCHS
    assert all(sorted(sum(updates, [])) == [*range(SAMPLES)] and [*map(len, updates)] == [4] * 4 for updates in passes)
    others = (plain[:4], *passes, learnt(monkeypatch, a_run(shuffle=True), 1)[:4])
    others = (*others, learnt(monkeypatch, a_run(shuffle=True, seed=2), 0)[:4])
    assert len({str(updates) for updates in others}) == len(others)
    assert learnt(monkeypatch, a_run(shuffle=True), 0) == shuffled


def test_a_sample_of_a_shuffled_mini_batch_is_named_by_its_place_in_the_step() -> None:
    limits = MismatchLimits(MismatchConfig(stop_sample=0.5), print)
    rollout = a_rollout(0).pick(torch.tensor([11, 3]))
    log_probs = torch.tensor([0.0, 0.0, 0.75, 0.75])
    with pytest.raises(MismatchError, match="sample 3 0.75"):
        limits.check(rollout, log_probs, torch.ones(4, dtype=torch.bool), [11, 3])


def test_of_a_mini_batch_of_older_samples_alone_no_mismatch_is_known() -> None:
    """No mismatch is reported for replayed samples only. 0.0 would mean that engine and trainer agree."""
    rollout, none = a_rollout(0).pick(torch.tensor([1])), torch.zeros(2, dtype=torch.bool)
    assert MismatchLimits(MismatchConfig(), print).check(rollout, torch.full((2,), -9.0), none) == {}
