"""The adaptive KL controller in the trainer: ten steps of unequal responses, against verl's definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl import platform

platform.install()

from mrl.algo import kl  # noqa: E402
from mrl.config.schema import RLConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.trainers.rl.experience import Passes, forward_passes, make_experience  # noqa: E402
from mrl.trainers.rl.loop import adapt_kl  # noqa: E402
from mrl.trainers.rl.replay import Reused  # noqa: E402
from tests.helpers.bare_run import bare_run  # noqa: E402

TARGET, HORIZON, COEF = 0.05, 64, 0.2
SETTINGS = {
    "trainer": "rl",
    "run": {"name": "kl"},
    "model": {"path": "-"},
    "data": {"train": "-"},
    "reward": {"function": "exact_match"},
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 2},
    "algorithm": {
        "adv_estimator": "grpo",
        "kl": {
            "use_in_reward": True,
            "penalty": "k1",
            "coef": COEF,
            "controller": "adaptive",
            "target": TARGET,
            "horizon_samples": HORIZON,
        },
    },
}
IN_LOSS = {"adv_estimator": "gae", "kl": {"use_in_loss": True, "coef": COEF}}


class Model:
    """A model whose log-probs are the engine's minus a distance for each sample."""

    def __init__(self, distance: Tensor) -> None:
        self.distance = distance

    def log_probs(self, rollout: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
        log_probs = rollout.rollout_log_probs - self.distance.repeat_interleave(rollout.response_lens)
        return log_probs, torch.zeros_like(log_probs)


def samples(step: int, lengths: list[int]) -> Rollout:
    responses, count = torch.tensor(lengths), len(lengths)
    generator = torch.Generator().manual_seed(step)
    return Rollout(
        step=step,
        tokens=torch.zeros(int(responses.sum()) + count, dtype=torch.int64),
        seq_lens=responses + 1,
        prompt_lens=torch.ones(count, dtype=torch.int64),
        group=torch.arange(count) // 2,
        scores=torch.randn(count, generator=generator),
        rollout_log_probs=-torch.rand(int(responses.sum()), generator=generator),
    )


def verl(coef: float, distance: Tensor, mask: Tensor) -> float:
    """verl: current_kl = mean over the batch of masked_mean(kld, mask, axis=-1); kl_ctrl.update(current_kl,
    batch_size)."""
    kld = distance.double()[:, None] * mask
    current = float((kld.sum(1) / mask.sum(1)).mean())
    return coef * (1 + min(max(current / TARGET - 1, -0.2), 0.2) * mask.shape[0] / HORIZON)


def a_step(run: Any, rollout: Rollout, distance: Tensor, reused: Reused | None = None) -> dict[str, float]:
    actor, ref = Model(torch.zeros_like(distance)), Model(distance)
    settings, coef = run.cfg.algorithm, run.kl_controller.value
    passes = forward_passes(settings, rollout, 1.0, actor, None, ref)  # type: ignore[arg-type]
    return adapt_kl(run, make_experience(settings, rollout, passes, coef, reused), {})


def a_run() -> Any:
    cfg = RLConfig.model_validate(SETTINGS)
    return replace(
        bare_run(cfg, None, None),  # type: ignore[arg-type]
        ref=object(),  # type: ignore[arg-type]
        kl_controller=kl.make_controller("adaptive", coef=COEF, target=TARGET, horizon_samples=HORIZON),
    )


def test_the_coefficient_is_verls_over_ten_steps() -> None:
    run, want = a_run(), COEF
    for step in range(10):
        lengths = [2, 40, 3, 25, 1, 9, 30, 4]
        distance = torch.tensor(lengths) * 0.002 + 0.01 * step  # larger for long responses
        rollout = samples(step, lengths)
        metrics = a_step(run, rollout, distance)
        want = verl(want, distance, rollout.response_mask)
        assert metrics["kl/ref"] == pytest.approx(float(distance.double().mean()), rel=1e-5)
        assert run.kl_controller.value == pytest.approx(want, rel=1e-5)
    assert run.kl_controller.value != pytest.approx(COEF, rel=1e-2)


def test_a_mean_over_tokens_would_move_it_the_other_way() -> None:
    run, lengths = a_run(), [50, 1, 1, 1]
    distance = torch.tensor([0.1, 0.01, 0.01, 0.01])  # means: 0.095 over tokens, 0.033 over responses
    a_step(run, samples(0, lengths), distance)
    assert run.kl_controller.value < COEF


def test_samples_of_earlier_steps_are_not_counted() -> None:
    run, rollout = a_run(), samples(0, [5, 2, 8, 3])
    old = torch.tensor([False, True, False, True])
    tokens = old.repeat_interleave(rollout.response_lens)
    reused = Reused(old, tokens, torch.zeros(tokens.numel()))
    metrics = a_step(run, rollout, torch.tensor([0.02, 5.0, 0.06, 5.0]), reused)
    assert metrics["kl/ref"] == pytest.approx(0.04, rel=1e-5)


def test_a_step_of_the_critic_alone_claims_no_distance_that_nothing_has_measured() -> None:
    run = replace(a_run(), cfg=RLConfig.model_validate(SETTINGS | {"algorithm": IN_LOSS}))
    rollout = samples(0, [5, 2, 8, 3])
    of_it = make_experience(run.cfg.algorithm, rollout, Passes(values=torch.zeros(18)), COEF)
    assert adapt_kl(run, of_it, {"critic/loss": 1.0}) == {"kl/coef": COEF}
    assert adapt_kl(run, of_it, {"actor/ref_kl": 0.25}) == {"kl/coef": COEF, "kl/ref": 0.25}


@pytest.mark.parametrize("samples_seen", [1, 64, 65, 5 * 64, 100 * 64])
def test_the_coefficient_stays_above_0_however_many_samples_a_step_has(samples_seen: int) -> None:
    """The coefficient stays above 0 for any number of samples per step. A negative one would reward distance from the
    reference, and the next update would reverse it."""
    controller = kl.AdaptiveController(COEF, TARGET, HORIZON)
    for _ in range(3):
        before = controller.value
        controller.update(0.0, samples_seen)
        assert 0 < controller.value < before
    if samples_seen <= HORIZON:
        assert controller.value == pytest.approx(COEF * (1 - 0.2 * samples_seen / HORIZON) ** 3), "verl's and TRL's"
