"""Samples in checkpoints, without what follows from their requests."""

from __future__ import annotations

import json
from typing import Any

import torch

from mrl.core import Request, Sample

ARRAYS = ("response_ids", "log_probs", "drawn", "versions", "experts")
TEXTS = ("finish_reason", "weight_version", "response_text")


def plain(sample: Sample) -> dict[str, Any]:
    """Tensors and plain values; scores are made anew."""
    known = vars(sample)
    arrays = {name: torch.from_numpy(known[name]) for name in ARRAYS if known[name] is not None}
    said = json.dumps({"messages": sample.messages, "environment": sample.environment})
    return {"arrays": arrays, "said": said, **{name: known[name] for name in TEXTS}}


def restored(request: Request, kept: dict[str, Any]) -> Sample:
    """What `plain` was made of."""
    arrays = {name: tensor.numpy() for name, tensor in kept["arrays"].items()}
    return Sample(request, **arrays, **{name: kept[name] for name in TEXTS}, **json.loads(kept["said"]))
