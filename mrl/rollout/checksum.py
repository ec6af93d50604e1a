"""The hash that an engine on CPU reports for a parameter, so that the trainer can compute the same."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def tensor_checksum(tensor: Tensor) -> str:
    """16 hex digits: the first 8 bytes of SHA-256 over the contiguous bytes of `tensor` (any dtype, on CPU)."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.data).hexdigest()[:16]
