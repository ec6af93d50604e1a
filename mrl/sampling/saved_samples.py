"""Samples in checkpoints, without what follows from their requests."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from mrl.core import Request, Sample

ARRAYS = {  # name in checkpoints -> field of a Sample
    "response_ids": "response_ids",
    "log_probs": "log_probs",
    "drawn": "action_mask",
    "versions": "token_weight_versions",
    "experts": "routed_experts",
    "rewards": "token_rewards",
}
TEXTS = ("finish_reason", "weight_version", "response_text", "left_out")


def plain(sample: Sample) -> dict[str, Any]:
    """Tensors and plain values; scores are made anew."""
    known = vars(sample)
    arrays = {name: torch.from_numpy(known[field]) for name, field in ARRAYS.items() if known[field] is not None}
    said = json.dumps({"messages": sample.messages, "environment": sample.environment})
    arrays["prompt"] = torch.tensor(sample.request.prompt.token_ids, dtype=torch.int32)  # a harness may write its own
    arrays["sequence_lens"] = torch.tensor(sample.sequence_lens, dtype=torch.int32)
    return {"arrays": arrays, "said": said, **{name: known[name] for name in TEXTS}}


def restored(request: Request, kept: dict[str, Any]) -> Sample:
    """Returns the sample that `plain` was called with."""
    arrays = {name: tensor.numpy() for name, tensor in kept["arrays"].items()}
    prompt, lens = (tuple(arrays.pop(name).tolist()) for name in ("prompt", "sequence_lens"))
    texts = {name: kept[name] for name in TEXTS}
    if prompt != request.prompt.token_ids:
        request = replace(request, prompt=replace(request.prompt, token_ids=prompt))
    arrays = {ARRAYS[name]: array for name, array in arrays.items()}
    return Sample(request, **arrays, **texts, sequence_lens=lens, **json.loads(kept["said"]))
