"""Discounted suffix sums as small matrix products: no loop over tokens or blocks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mrl.kernels.masked import row_groups

BLOCK = 16


def discounted_suffix_sum(x: Tensor, decay: float) -> Tensor:
    """y[:, t] = sum over s >= t of decay**(s - t) * x[:, s]; x and y are [B, T] floating point, 0 <= decay <= 1."""
    out = torch.empty_like(x)
    sums = SuffixSums(decay, x)
    for rows in row_groups(x):
        sums.write(x[rows], out[rows])
    return out


class SuffixSums:
    """Suffix sums, as in `discounted_suffix_sum`, of rows of one length.

    Each row is cut into blocks. One product with a triangular matrix of powers gives the sums inside the blocks. The
    same sums of the blocks' first entries, with decay**BLOCK, give the carry of every block into the preceding one.
    """

    def __init__(self, decay: float, like: Tensor) -> None:
        """like: [.., T], of the rows' dtype and device."""
        self._length = like.size(1)
        self._blocks = max(1, -(-self._length // BLOCK))
        distance = torch.arange(BLOCK, 0, -1, dtype=torch.float64, device=like.device)
        powers = torch.pow(torch.tensor(decay, dtype=torch.float64, device=like.device), distance)
        self._powers, self._matrix = powers.to(like.dtype), _power_matrix(BLOCK, decay, like)
        self._carries = SuffixSums(decay**BLOCK, like[:, : self._blocks]) if self._blocks > 1 else None

    def write(self, x: Tensor, out: Tensor) -> None:
        """Writes the sums of `x` into `out`; both [rows, T], contiguous, and not one tensor."""
        rows = x.size(0)
        room = self._blocks * BLOCK - self._length
        padded = pad(x, (0, room)) if room else x
        inside = torch.empty_like(padded) if room else out
        torch.mm(padded.reshape(rows * self._blocks, BLOCK), self._matrix, out=inside.view(rows * self._blocks, BLOCK))
        if self._carries is not None:
            blocks = inside.view(rows, self._blocks, BLOCK)
            carry = torch.empty(rows, self._blocks, dtype=x.dtype, device=x.device)
            self._carries.write(blocks[:, :, 0].contiguous(), carry)
            blocks[:, :-1].addcmul_(carry[:, 1:, None], self._powers)
        if room:
            out.copy_(inside[:, : self._length])


def _power_matrix(size: int, decay: float, like: Tensor) -> Tensor:
    """[size, size] with decay**(s - t) at row s >= column t, 0 above; powers are taken in float64."""
    index = torch.arange(size, device=like.device, dtype=torch.float64)
    distance = index[:, None] - index[None, :]
    powers = torch.pow(torch.tensor(decay, dtype=torch.float64, device=like.device), distance.clamp(min=0))
    return powers.masked_fill(distance < 0, 0).to(like.dtype)
