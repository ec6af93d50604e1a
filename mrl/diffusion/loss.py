"""Clipped policy gradient over denoising steps, and KL divergence from the initial model."""

from __future__ import annotations

from torch import Tensor, maximum


def clipped(log_probs: Tensor, old: Tensor, advantages: Tensor, clip_range: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns losses of rows (a row is one denoising step of one image) and their metrics, all [n].

    arXiv 2305.13301, eq. 7 with PPO's clipping. `clip_range` is small, 1e-4: log-probs are means over a latent's
    elements.
    """
    log_ratio = log_probs - old
    ratio = log_ratio.exp()
    losses = maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))
    metrics = {
        "approx_kl": 0.5 * log_ratio.detach() ** 2,
        "clipfrac": ((ratio.detach() - 1).abs() > clip_range).float(),
    }
    return losses, metrics


def kl_to_reference(mean: Tensor, reference: Tensor, std: Tensor) -> Tensor:
    """Returns the KL divergence [n] of two Gaussian steps with one deviation, mean over elements (arXiv 2505.05470, eq.
    11).

    mean, reference [n, ...]; std [n]
    """
    return ((mean - reference) ** 2).flatten(1).mean(1) / (2 * std**2)
