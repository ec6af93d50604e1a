"""Finished samples -> the step's `Rollout`."""

from __future__ import annotations

import torch

from mrl.core import Rollout, Sample


def collate(step: int, samples: list[Sample]) -> Rollout:
    """Flat tensors in the order of sample ids, which must be 0 ... B-1.

    Raises ValueError naming the sample for a gap in the ids, a response without tokens, or log-probs that do not match
    the response.
    """
    ordered = sorted(samples, key=lambda s: s.request.sample_id)
    for place, sample in enumerate(ordered):
        if sample.request.sample_id != place:
            raise ValueError(f"step {step}: expected sample {place}, got sample {sample.request.sample_id}")
        if not sample.response_ids:
            raise ValueError(f"step {step}: sample {place} has no response tokens ({sample.finish_reason})")
        if len(sample.log_probs) != len(sample.response_ids):
            raise ValueError(
                f"step {step}: sample {place} has {len(sample.response_ids)} response tokens "
                f"and {len(sample.log_probs)} log-probs"
            )
    if not ordered:
        raise ValueError(f"step {step}: no samples")
    prompts = [s.request.prompt.token_ids for s in ordered]
    return Rollout(
        step=step,
        tokens=torch.tensor([t for p, s in zip(prompts, ordered, strict=True) for t in (*p, *s.response_ids)]),
        seq_lens=torch.tensor([len(p) + len(s.response_ids) for p, s in zip(prompts, ordered, strict=True)]),
        prompt_lens=torch.tensor([len(p) for p in prompts]),
        group=torch.tensor([s.request.group for s in ordered]),
        scores=torch.tensor([s.score for s in ordered], dtype=torch.float32),
        rollout_log_probs=torch.tensor([x for s in ordered for x in s.log_probs], dtype=torch.float32),
        rows=torch.tensor([s.request.prompt.index for s in ordered]),
    )
