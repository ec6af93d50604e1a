"""What sequences begin with in common: samples of a group and pairs of preferences a prompt, others a system prompt.

A model can compute it once a micro-batch: what it makes of a token depends on the tokens before it alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mrl.core import Rollout
from mrl.units import TOKEN, starts

WORTH = 16  # of so many tokens one has to be another sequence's, too


def common_prefixes(rollout: Rollout, samples: Sequence[int]) -> Tensor:
    """[n] int64: how many of each one's first tokens, `ahead_of_outputs`, are also those of the one before it; 0 of the
    first one, and of all where these are so few that to share them costs more than it saves."""
    ids = torch.as_tensor(samples, dtype=torch.int64)
    lens, start = rollout.seq_lens[ids], starts(rollout.seq_lens)[ids]
    most = torch.minimum(ahead_of_outputs(rollout, ids), lens.roll(1))
    most[:1] = 0
    of = torch.repeat_interleave(torch.arange(len(ids)), most)
    offset = torch.arange(of.numel()) - starts(most)[of]
    differs = rollout.tokens[start[of] + offset] != rollout.tokens[start[of - 1] + offset]
    common = most.scatter_reduce(0, of[differs], offset[differs], "amin")
    return common if int(common.sum()) * WORTH >= int(lens.sum()) else torch.zeros_like(common)


def ahead_of_outputs(rollout: Rollout, samples: Tensor) -> Tensor:
    """[n] int64: tokens of each of the samples [n] before the first that predicts one of its response. Only these can
    be others', too."""
    if rollout.drawn is None:
        return (rollout.prompt_lens[samples] - 1).clamp(min=0)
    lens = rollout.seq_lens[samples]
    drawn = rollout.drawn[TOKEN.places(rollout, samples)].nonzero()[:, 0]
    of = torch.repeat_interleave(torch.arange(len(lens)), lens)[drawn]
    first = lens.scatter_reduce(0, of, drawn - starts(lens)[of], "amin")
    return (first - 1).clamp(min=0)


def ways_to_cut(families: Tensor, most: Tensor) -> Iterator[Tensor]:
    """Sizes [m] of groups of samples, one after the other, that are wholes or equal parts of families: from wholes to
    pairs, each time of half as many.

    families [f] int64: how many samples each has; most [f] int64: how many a group of it may have
    """
    limit = int(torch.minimum(families, most).max())
    while limit > 1:
        parts = -(-families // most.clamp(max=limit))
        of = torch.repeat_interleave(torch.arange(len(families)), parts)
        number = torch.arange(len(of)) - starts(parts)[of]
        yield (families // parts)[of] + (number < (families % parts)[of])
        limit = -(-limit // 2)
