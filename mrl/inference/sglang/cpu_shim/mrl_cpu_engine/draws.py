"""Seeded draws: argmax(log p + Gumbel noise) of each row, where the noise is a hash of (seed, position, token).

With u = hash / (2^32 - 1) a token has the score log p - log(-log u), which sglang computes of every token, in float64.
Here each gets a bound: -log u >= 1 - u, so that its score is at most log(p / (1 - u)). Only tokens whose bound reaches
the score of the token with the highest bound can win, a few of a row; their scores are computed, as sglang does it. The
draws are the same, to the bit. `mrl.kernels.native` does that in one pass, where it is there.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mrl.kernels.native import engine as native

from .kernels import Words, hash_rows, scrambled

_BLOCK = 1 << 20  # logits whose bounds are computed at once: every block costs forty calls
_TILE = 256  # of them whose least bound is looked at first
_SLACK = 1 + 1e-5  # for the rounding of the bounds, which are float32
_UINT32_MAX = (1 << 32) - 1


def draw(log_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The tokens drawn, [n] int64. log_probs [n, vocab] float32, -inf for what is not to be drawn; seeds, positions
    [n]."""
    if native.supports_draw(log_probs):
        return native.draw(log_probs, seeds, positions)
    n, vocab = log_probs.shape
    drawn = torch.empty(n, dtype=torch.int64)
    columns = _columns(-(-vocab // _TILE) * _TILE)
    rows = max(1, _BLOCK // vocab)
    for start in range(0, n, rows):
        at = slice(start, start + rows)
        drawn[at] = _draw_block(log_probs[at], hash_rows(seeds[at], positions[at], columns))
    return drawn


@lru_cache(maxsize=2)
def _columns(width: int) -> Words:
    return scrambled(torch.arange(width))


def scores(log_probs: Tensor, hashed: Tensor) -> Tensor:
    """float64, of the shape of both; hashed: int32 bits. Noise is kept off both infinities, as sglang keeps it."""
    log_u = (hashed.view(torch.uint32).to(torch.float64) / _UINT32_MAX).log_()
    noise = log_u.clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32)).neg_().log_().neg_()
    return noise.add_(log_probs.to(torch.float64))


def _draw_block(log_probs: Tensor, hashed: Tensor) -> Tensor:
    """hashed [n, whole tiles] int32; its columns beyond the vocabulary are never drawn."""
    inverse = _inverse_bounds(log_probs, hashed)
    likely = torch.from_numpy(inverse.numpy().argmin(1))  # torch's own takes ten times as long
    first = likely.clamp_(max=log_probs.size(1) - 1)
    row = torch.arange(len(hashed))
    limit = (-scores(log_probs[row, first], hashed[row, first])).exp() * _SLACK
    tiles = inverse.view(len(hashed), -1, _TILE)
    row, tile = (tiles.amin(-1) <= limit[:, None]).nonzero(as_tuple=True)
    near = (tiles[row, tile] <= limit[row, None]).flatten().numpy().nonzero()[0]
    some, within = torch.from_numpy(near // _TILE), torch.from_numpy(near % _TILE)
    return _best(log_probs, hashed, row[some], tile[some] * _TILE + within)


def _best(log_probs: Tensor, hashed: Tensor, row: Tensor, token: Tensor) -> Tensor:
    """[n]: of the candidates (row, token) each row's token of the highest score, the first of equal ones as argmax
    takes it. Rows without any, such as those that are not finite, are looked at whole."""
    score = scores(log_probs[row, token], hashed[row, token])
    best = torch.full((len(hashed),), -torch.inf, dtype=torch.float64).scatter_reduce_(0, row, score, "amax")
    wins = score == best[row]
    nobody = log_probs.size(1)
    found = torch.full((len(hashed),), nobody).scatter_reduce_(0, row[wins], token[wins], "amin")
    for lost in (found == nobody).nonzero()[:, 0].tolist():
        found[lost] = scores(log_probs[lost], hashed[lost, :nobody]).argmax()
    return found


def _inverse_bounds(log_probs: Tensor, hashed: Tensor) -> Tensor:
    """float32 (1 - u) / p, rounded down: what exp(-score) is at least. Infinite beyond the vocabulary."""
    below_one = hashed.bitwise_not().bitwise_right_shift_(1).bitwise_and_((1 << 31) - 1)
    p = torch.zeros(hashed.shape)
    torch.exp(log_probs, out=p[:, : log_probs.size(1)])
    return below_one.to(torch.float32).clamp_(min=0.5).mul_(2 / _UINT32_MAX).div_(p)
