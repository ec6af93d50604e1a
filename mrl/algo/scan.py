"""Discounted sums from the right as two small matrix products: no loop over tokens, rows or blocks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128


def discounted_suffix_sum(x: Tensor, decay: float) -> Tensor:
    """y[:, t] = sum over s >= t of decay**(s - t) * x[:, s]; x and y are [B, T] floating point, 0 <= decay <= 1.

    Each row is cut into blocks. One product with a triangular matrix of powers gives the sums inside the blocks; the
    same product on the blocks' first entries, with decay**BLOCK, gives what every block hands to the one before it.
    """
    rows, length = x.shape
    blocks = max(1, -(-length // BLOCK))
    padded = pad(x, (0, blocks * BLOCK - length)) if length != blocks * BLOCK else x
    inside = (padded.reshape(rows * blocks, BLOCK) @ _power_matrix(BLOCK, decay, x)).view(rows, blocks, BLOCK)
    if blocks > 1:
        from_here_on = inside[:, :, 0] @ _power_matrix(blocks, decay**BLOCK, x)
        carry = pad(from_here_on[:, 1:], (0, 1))
        distance = torch.arange(BLOCK, 0, -1, device=x.device, dtype=torch.float64)
        powers = torch.pow(torch.tensor(decay, dtype=torch.float64, device=x.device), distance).to(x.dtype)
        inside.addcmul_(carry[:, :, None], powers)
    return inside.view(rows, blocks * BLOCK)[:, :length]


def _power_matrix(size: int, decay: float, like: Tensor) -> Tensor:
    """[size, size] with decay**(s - t) at row s >= column t, 0 above; powers are taken in float64."""
    index = torch.arange(size, device=like.device, dtype=torch.float64)
    distance = index[:, None] - index[None, :]
    powers = torch.pow(torch.tensor(decay, dtype=torch.float64, device=like.device), distance.clamp(min=0))
    return powers.masked_fill(distance < 0, 0).to(like.dtype)
