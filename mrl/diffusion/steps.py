"""Sampler steps as Gaussian policies: mean and standard deviation from the net's output, in float32.

A sampler uses its scheduler's own noise levels, so that the trained process is the one that diffusers samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class DenoisingSteps:
    """The steps of a sampler, by index i from 0 (pure noise) to S - 1.

    Attributes:
        times [S]: times for the network
        stds [S]: standard deviations; a step with 0 is deterministic: it has no probability and is not trained
        mean: (output, x, i [n]) -> the mean of the next latent, all [n, ...] float32
    """

    times: Tensor
    stds: Tensor
    mean: Callable[[Tensor, Tensor, Tensor], Tensor]

    @property
    def counted(self) -> list[int]:
        """Returns the indices of the stochastic steps."""
        return (self.stds > 0).nonzero().flatten().tolist()

    def next(self, output: Tensor, x: Tensor, i: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the next latent [n, ...] and its mean."""
        mean = self.mean(output.float(), x.float(), i)
        return mean + _like(self.stds.to(x.device)[i], x) * noise, mean

    def log_prob(self, latent: Tensor, mean: Tensor, i: Tensor) -> Tensor:
        """Returns the log-density [n] of `latent` under the step, as the mean over elements (DDPO, arXiv 2305.13301).

        The mean makes the clip range independent of the image size. A step with std 0 must not be passed; NaN never
        occurs.
        """
        std = _like(self.stds.to(mean.device)[i], mean)
        each = -((latent.float() - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
        return each.flatten(1).mean(1)


def ddim(scheduler: Any, steps: int, eta: float, **timing: Any) -> DenoisingSteps:
    """Returns the steps of DDIM (arXiv 2010.02502, eq. 12 and 16); eta 1 is as random as DDPM.

    The time before the last step is at least 0, as in DDPO's reference: its last step still has noise, where the
    scheduler's has none. Nets may predict the noise, the image or v.
    """
    scheduler.set_timesteps(steps, **timing)
    kind, alphas = scheduler.config.prediction_type, scheduler.alphas_cumprod.float()
    times = scheduler.timesteps.long().cpu()
    before = (times - scheduler.config.num_train_timesteps // steps).clamp(min=0)
    here, there = alphas[times].double(), alphas[before].double()
    variance = (1 - there) / (1 - here) * (1 - here / there)
    stds = eta * variance.clamp(min=0).sqrt()
    rest = (1 - there - stds**2).clamp(min=0).sqrt()
    a, b = here.sqrt().float(), (1 - here).sqrt().float()

    def mean(output: Tensor, x: Tensor, i: Tensor) -> Tensor:
        root, noisy = (_like(part.to(x.device)[i], x) for part in (a, b))
        if kind == "epsilon":
            image, noise = (x - noisy * output) / root, output
        elif kind == "v_prediction":
            image, noise = root * x - noisy * output, root * output + noisy * x
        else:
            image, noise = output, (x - root * output) / noisy
        onward, kept = (_like(part.float().to(x.device)[i], x) for part in (there.sqrt(), rest))
        return onward * image + kept * noise

    return DenoisingSteps(times, stds.float(), mean)


def flow_sde(scheduler: Any, steps: int, level: float, **timing: Any) -> DenoisingSteps:
    """Returns the stochastic steps of a rectified flow with velocity prediction (Flow-GRPO, arXiv 2505.05470, eq. 9).

    The steps keep the flow's marginals, with noise of `level` sqrt(sigma / (1 - sigma)) a root of time. At sigma 1 the
    denominator uses the second sigma, as in the reference. timing: arguments of the scheduler besides `steps`
    """
    scheduler.set_timesteps(steps, **timing)
    sigmas = scheduler.sigmas.double().cpu()
    now, dt = sigmas[:-1], sigmas[1:] - sigmas[:-1]
    below_one = torch.where(now == 1, sigmas[1], now)
    rate = level * (now / (1 - below_one)).sqrt()
    drift = rate**2 / (2 * now)
    of_x, of_velocity = (1 + drift * dt).float(), ((1 + drift * (1 - now)) * dt).float()

    def mean(output: Tensor, x: Tensor, i: Tensor) -> Tensor:
        return _like(of_x.to(x.device)[i], x) * x + _like(of_velocity.to(x.device)[i], x) * output

    return DenoisingSteps(scheduler.timesteps.float().cpu(), (rate * (-dt).sqrt()).float(), mean)


STEPS: dict[str, Callable[..., DenoisingSteps]] = {"ddim": ddim, "flow_sde": flow_sde}  # by sampler.kind


def _like(values: Tensor, x: Tensor) -> Tensor:
    """Reshapes [n] to [n, 1, ...], to multiply with x."""
    return values.view(-1, *(1,) * (x.dim() - 1))
