"""Sampler steps against diffusers and torch's distributions; advantages against the reference's numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

diffusers = pytest.importorskip("diffusers", reason="pip install 'mrl[diffusion]'")

from mrl.config.checks.diffusion import scheduler_problem  # noqa: E402
from mrl.diffusion import advantages, loss  # noqa: E402
from mrl.diffusion.steps import ddim, flow_sde  # noqa: E402

SIZE = (3, 1, 4, 4)


def draws(seed: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_a_ddim_step_is_that_of_diffusers(kind: str, eta: float) -> None:
    settings: dict[str, Any] = {"clip_sample": False, "steps_offset": 1, "set_alpha_to_one": False}
    theirs = diffusers.DDIMScheduler(prediction_type=kind, **settings)
    steps = ddim(theirs, 10, eta)
    theirs.alphas_cumprod = theirs.alphas_cumprod.double()  # in float32 its 1 - alpha near time 0 has only four digits
    theirs.final_alpha_cumprod = theirs.alphas_cumprod[0]
    x, output, noise = draws(1, 3)
    for place, time in enumerate(theirs.timesteps):
        said, before, drawn = (each.double() for each in (output, x, noise))
        expected = theirs.step(said, time, before, eta=eta, variance_noise=drawn if eta else None).prev_sample
        got, mean = steps.next(output, x, torch.full((3,), place), noise)
        assert torch.allclose(got.double(), expected, rtol=1e-6, atol=3e-6 * float(expected.abs().max()))
        if eta:
            normal = torch.distributions.Normal(mean, steps.stds[place]).log_prob(got)
            assert torch.allclose(steps.log_prob(got, mean, torch.full((3,), place)), normal.flatten(1).mean(1))


def test_a_step_of_the_flow_is_one_of_euler_and_maruyama() -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    steps = flow_sde(scheduler, 10, 0.7)
    x, velocity, noise = (draw.double() for draw in draws(2, 3))
    sigmas = scheduler.sigmas.double()
    for place in range(10):
        sigma, dt = sigmas[place], sigmas[place + 1] - sigmas[place]
        rate = 0.7 * torch.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
        drift = velocity + rate**2 / (2 * sigma) * (x + (1 - sigma) * velocity)
        expected = x + drift * dt + rate * torch.sqrt(-dt) * noise
        got, _ = steps.next(velocity.float(), x.float(), torch.full((3,), place), noise.float())
        assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_deterministic_step_takes_no_part() -> None:
    scheduler = diffusers.DDIMScheduler(clip_sample=False, steps_offset=0, timestep_spacing="leading")
    steps = ddim(scheduler, 10, 1.0)
    assert steps.counted == list(range(9)), "the last one ends where it begins, at time 0"
    assert ddim(diffusers.DDIMScheduler(clip_sample=False, steps_offset=1), 10, 1.0).counted == list(range(10))
    assert not ddim(scheduler, 10, 0.0).counted


def test_the_mean_log_prob_does_not_grow_with_the_image() -> None:
    steps = ddim(diffusers.DDIMScheduler(clip_sample=False, steps_offset=1), 10, 1.0)
    one = torch.tensor([4])
    small, large = (torch.full((1, 1, size, size), 0.3) for size in (4, 64))
    assert torch.allclose(steps.log_prob(small, 0 * small, one), steps.log_prob(large, 0 * large, one))


@pytest.mark.parametrize(
    ("kind", "name", "config", "said"),
    [
        ("ddim", "EulerDiscreteScheduler", {}, "has no ddim step; ddim supports DDIMScheduler"),
        ("ddim", "FlowMatchEulerDiscreteScheduler", {}, "use sampler.kind flow_sde"),
        ("ddim", "DDIMScheduler", {}, "clamped pixels have no gradient"),
        ("ddim", "DDIMScheduler", {"clip_sample": False, "prediction_type": "x"}, "'x' is none of epsilon"),
    ],
)
def test_schedulers_without_a_step_are_refused(kind: str, name: str, config: dict[str, Any], said: str) -> None:
    assert said in (scheduler_problem(kind, name, config) or "")


def test_prompt_statistics_are_those_of_the_reference() -> None:
    stats = advantages.PromptStats(buffer_size=4, min_count=3)
    first = np.array([1.0, 2.0, 4.0, 8.0])
    got = stats.advantages(["a", "a", "b", "a"], first)
    of_a, whole = np.array([1.0, 2.0, 8.0]), first
    assert np.allclose(got[[0, 1, 3]], (of_a - of_a.mean()) / (of_a.std() + 1e-6))
    assert np.isclose(got[2], (4.0 - whole.mean()) / (whole.std() + 1e-6)), "too few of b: the whole batch"
    again = advantages.PromptStats(buffer_size=4, min_count=3)
    again.load_state_dict(stats.state_dict())
    kept = np.array([2.0, 8.0, 3.0, 5.0])  # the oldest has left the buffer
    expected = (np.array([3.0, 5.0]) - kept.mean()) / (kept.std() + 1e-6)
    assert np.allclose(again.advantages(["a", "a"], np.array([3.0, 5.0])), expected)


def test_groups_and_batches_are_centred() -> None:
    scores, groups = np.array([1.0, 3.0, 5.0, 5.0, 9.0]), np.array([0, 0, 1, 1, 2])
    assert np.allclose(advantages.of_groups(scores, groups), [-1, 1, 0, 0, 0], atol=1e-3)
    assert abs(advantages.of_batch(scores).mean()) < 1e-9


def test_at_ratio_1_the_gradient_is_that_of_reinforce() -> None:
    log_probs = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    weights = torch.tensor([1.0, -2.0, 0.0])
    losses, metrics = loss.clipped(log_probs, log_probs.detach(), weights, 1e-4)
    losses.sum().backward()
    assert torch.equal(log_probs.grad, -weights)
    assert metrics["clipfrac"].sum() == 0 and metrics["approx_kl"].sum() == 0
    moved, far = loss.clipped(torch.tensor([0.1]), torch.tensor([0.0]), torch.tensor([1.0]), 1e-4)
    assert math.isclose(float(moved), -1.0001, rel_tol=1e-6) and far["clipfrac"] == 1
