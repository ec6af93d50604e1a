"""Collation of finished samples into the step's `Rollout`."""

from __future__ import annotations

import numpy as np
import torch

from mrl.core import Rollout, Sample


def collate(step: int, samples: list[Sample]) -> Rollout:
    """Returns flat tensors in the order of sample ids, which must be 0 ... B-1.

    Raises ValueError, which names the sample, for a gap in the ids, a response without tokens, log-probs that do not
    match the response, or a weight version that is not a number of steps.
    """
    ordered = sorted(samples, key=lambda s: s.request.sample_id)
    for place, sample in enumerate(ordered):
        if sample.request.sample_id != place:
            raise ValueError(f"step {step + 1}: expected sample {place}, got sample {sample.request.sample_id}")
        if not sample.num_drawn:
            raise ValueError(f"step {step + 1}: sample {place} has no response tokens ({sample.finish_reason})")
        if len(sample.log_probs) != sample.num_drawn:
            found = f"{sample.num_drawn} response tokens and {len(sample.log_probs)} log-probs"
            raise ValueError(f"step {step + 1}: sample {place} has {found}")
        if not (sample.weight_version.isascii() and sample.weight_version.isdecimal()):
            raise ValueError(
                f"step {step + 1}: sample {place} has the weight version {sample.weight_version!r}, "
                "which is not a number of steps"
            )
    if not ordered:
        raise ValueError(f"step {step + 1}: no samples")
    seen = [s.request.prompt.images for s in ordered]
    shapes = [shape for images in seen for shape in images or ()]
    cuts = [s.sequence_lens or (len(s.request.prompt.token_ids) + len(s.response_ids),) for s in ordered]
    is_cut = any(s.drawn is not None for s in ordered)  # agent trajectories can consist of several sequences
    return Rollout.of(
        step,
        [s.request.prompt.token_ids for s in ordered],
        [s.response_ids for s in ordered],
        group=torch.tensor([s.request.group for s in ordered]),
        scores=torch.tensor([s.score for s in ordered], dtype=torch.float32),
        rollout_log_probs=torch.from_numpy(np.concatenate([s.log_probs for s in ordered])),
        rows=torch.tensor([s.request.prompt.index for s in ordered]),
        weight_versions=torch.tensor([int(s.weight_version) for s in ordered]),
        born=_born(ordered) if any(s.versions is not None for s in ordered) else None,
        drawn=_drawn(ordered) if any(s.drawn is not None for s in ordered) else None,
        experts=_experts(ordered),
        rewards=_rewards(ordered) if any(s.rewards is not None for s in ordered) else None,
        sequence_counts=torch.tensor([len(each) for each in cuts]) if is_cut else None,
        sequence_lens=torch.tensor([tokens for each in cuts for tokens in each]) if is_cut else None,
        image_counts=None if seen[0] is None else torch.tensor([len(images or ()) for images in seen]),
        images=None if seen[0] is None else torch.tensor(shapes, dtype=torch.int64).reshape(-1, 3),
    )


def _born(samples: list[Sample]) -> torch.Tensor:
    """Returns the token weight versions of all responses, [R] int32."""
    each = [np.full(s.num_drawn, int(s.weight_version)) if s.versions is None else s.versions for s in samples]
    return torch.from_numpy(np.concatenate(each).astype(np.int32))


def _experts(samples: list[Sample]) -> torch.Tensor | None:
    """Returns the routed experts, [N, layers, experts a token]; None if no sample has them."""
    each = [s.experts for s in samples if s.experts is not None]
    return torch.from_numpy(np.concatenate(each)) if each else None


def _rewards(samples: list[Sample]) -> torch.Tensor:
    """Returns the token rewards of all responses, [R] float32."""
    each = [np.zeros(s.num_drawn) if s.rewards is None else s.rewards for s in samples]
    return torch.from_numpy(np.concatenate(each).astype(np.float32))


def _drawn(samples: list[Sample]) -> torch.Tensor:
    """Returns the action mask over prompts and responses, [N] bool."""
    parts = []
    for sample in samples:
        parts.append(np.zeros(len(sample.request.prompt.token_ids), dtype=bool))
        parts.append(np.ones(len(sample.response_ids), dtype=bool) if sample.drawn is None else sample.drawn)
    return torch.from_numpy(np.concatenate(parts))
