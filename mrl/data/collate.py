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
        if not sample.num_generated_tokens:
            raise ValueError(f"step {step + 1}: sample {place} has no response tokens ({sample.finish_reason})")
        if len(sample.log_probs) != sample.num_generated_tokens:
            found = f"{sample.num_generated_tokens} response tokens and {len(sample.log_probs)} log-probs"
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
    is_cut = any(s.action_mask is not None for s in ordered)  # agent trajectories can consist of several sequences
    return Rollout.of(
        step,
        [s.request.prompt.token_ids for s in ordered],
        [s.response_ids for s in ordered],
        group=torch.tensor([s.request.group for s in ordered]),
        scores=torch.tensor([s.score for s in ordered], dtype=torch.float32),
        rollout_log_probs=torch.from_numpy(np.concatenate([s.log_probs for s in ordered])),
        rows=torch.tensor([s.request.prompt.index for s in ordered]),
        weight_versions=torch.tensor([int(s.weight_version) for s in ordered]),
        token_weight_versions=_token_weight_versions(ordered)
        if any(s.token_weight_versions is not None for s in ordered)
        else None,
        action_mask=_action_mask(ordered) if any(s.action_mask is not None for s in ordered) else None,
        routed_experts=_experts(ordered),
        token_rewards=_rewards(ordered) if any(s.token_rewards is not None for s in ordered) else None,
        sequence_counts=torch.tensor([len(each) for each in cuts]) if is_cut else None,
        sequence_lens=torch.tensor([tokens for each in cuts for tokens in each]) if is_cut else None,
        image_counts=None if seen[0] is None else torch.tensor([len(images or ()) for images in seen]),
        images=None if seen[0] is None else torch.tensor(shapes, dtype=torch.int64).reshape(-1, 3),
    )


def _token_weight_versions(samples: list[Sample]) -> torch.Tensor:
    """Returns the token weight versions of all responses, [R] int32."""
    each = [
        np.full(s.num_generated_tokens, int(s.weight_version))
        if s.token_weight_versions is None
        else s.token_weight_versions
        for s in samples
    ]
    return torch.from_numpy(np.concatenate(each).astype(np.int32))


def _experts(samples: list[Sample]) -> torch.Tensor | None:
    """Returns the routed experts, [N, layers, experts a token]; None if no sample has them."""
    each = [s.routed_experts for s in samples if s.routed_experts is not None]
    return torch.from_numpy(np.concatenate(each)) if each else None


def _rewards(samples: list[Sample]) -> torch.Tensor:
    """Returns the token rewards of all responses, [R] float32."""
    each = [np.zeros(s.num_generated_tokens) if s.token_rewards is None else s.token_rewards for s in samples]
    return torch.from_numpy(np.concatenate(each).astype(np.float32))


def _action_mask(samples: list[Sample]) -> torch.Tensor:
    """Returns the action mask over prompts and responses, [N] bool."""
    parts = []
    for sample in samples:
        parts.append(np.zeros(len(sample.request.prompt.token_ids), dtype=bool))
        parts.append(
            np.ones(len(sample.response_ids), dtype=bool) if sample.action_mask is None else sample.action_mask
        )
    return torch.from_numpy(np.concatenate(parts))
