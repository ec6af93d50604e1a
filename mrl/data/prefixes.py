"""Common prefixes of sequences: samples of a group and pairs of preferences share a prompt, others a system prompt.

A model can compute a common prefix once a micro-batch: a token's activations depend on the tokens before it alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mrl.core import Rollout
from mrl.units import TOKEN, starts

WORTH = 16  # sharing pays off if at least one token in so many is shared


def common_prefixes(rollout: Rollout, samples: Sequence[int]) -> Tensor:
    """Returns the number of each sample's first tokens, among `tokens_before_outputs`, that the sample before it
    shares, [n] int64. It is 0 for the first sample, and for all if sharing would cost more than it saves.
    """
    ids = torch.as_tensor(samples, dtype=torch.int64)
    lens, start = rollout.seq_lens[ids], starts(rollout.seq_lens)[ids]
    most = torch.minimum(tokens_before_outputs(rollout, ids), lens.roll(1))
    most[:1] = 0
    of = torch.repeat_interleave(torch.arange(len(ids)), most)
    offset = torch.arange(of.numel()) - starts(most)[of]
    differs = rollout.tokens[start[of] + offset] != rollout.tokens[start[of - 1] + offset]
    common = most.scatter_reduce(0, of[differs], offset[differs], "amin")
    return common if int(common.sum()) * WORTH >= int(lens.sum()) else torch.zeros_like(common)


def tokens_before_outputs(rollout: Rollout, samples: Tensor) -> Tensor:
    """Returns the number of tokens of each of the samples [n] before the first that predicts a response token, [n]
    int64. Only these tokens can be shared.
    """
    if rollout.action_mask is None:
        return (rollout.prompt_lens[samples] - 1).clamp(min=0)
    lens = rollout.seq_lens[samples]
    drawn = rollout.action_mask[TOKEN.places(rollout, samples)].nonzero()[:, 0]
    of = torch.repeat_interleave(torch.arange(len(lens)), lens)[drawn]
    first = lens.scatter_reduce(0, of, drawn - starts(lens)[of], "amin")
    return (first - 1).clamp(min=0)


def family_splits(families: Tensor, most: Tensor) -> Iterator[Tensor]:
    """Yields group sizes [m] of consecutive samples: each group is a whole family or an equal part of one, from wholes
    down to pairs, half as large each time.

    families [f] int64: samples of each family; most [f] int64: maximum size of a group of that family
    """
    limit = int(torch.minimum(families, most).max())
    while limit > 1:
        parts = -(-families // most.clamp(max=limit))
        of = torch.repeat_interleave(torch.arange(len(families)), parts)
        number = torch.arange(len(of)) - starts(parts)[of]
        yield (families // parts)[of] + (number < (families % parts)[of])
        limit = -(-limit // 2)
