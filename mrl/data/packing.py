"""Packing of a `Rollout`'s samples into one micro-batch: concatenated sequences, sharded for context parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mrl.core import PackedBatch, Rollout
from mrl.data.errors import DataError
from mrl.data.image_positions import image_positions
from mrl.data.prefixes import common_prefixes
from mrl.families import VisionArch
from mrl.units import starts


def sequence_align(cp: int) -> int:
    """Returns the multiple that every packed sequence is padded to: 2 * cp chunks of equal size, 1 without a cut."""
    return 2 * cp if cp > 1 else 1


def require_ids(rollout: Rollout, vocab_size: int) -> None:
    """Raises DataError, which names sample and place, for a token without an embedding. Tensor-parallel embeddings
    would silently return zeros for such a token.
    """
    if not rollout.tokens.numel():
        return
    low, high = rollout.tokens.aminmax()
    if 0 <= int(low) <= int(high) < vocab_size:
        return
    at = int(((rollout.tokens < 0) | (rollout.tokens >= vocab_size)).nonzero()[0])
    sample = int((rollout.seq_lens.cumsum(0) <= at).sum())
    place = at - int(rollout.seq_lens[:sample].sum())
    raise DataError(
        f"step {rollout.step + 1}: token {place} of sample {sample} is {int(rollout.tokens[at])}, and the model's "
        f"vocabulary has the ids 0 to {vocab_size - 1}"
    )


def pack(
    rollout: Rollout,
    sample_ids: Sequence[int],
    cp: int,
    cp_rank: int,
    align_total: int,
    vision: VisionArch | None = None,
    *,
    shares: bool = False,
) -> PackedBatch:
    """Returns the part of one micro-batch that context-parallel rank `cp_rank` holds.

    Every sequence is padded to a multiple of `sequence_align(cp)`; a trailing dummy sequence brings the total (before
    the cut) to a multiple of `align_total`. Without samples the batch is one dummy sequence and no rows. Zig-zag: a
    sequence is cut into 2 * cp chunks and rank r holds chunks r and 2 * cp - 1 - r, in this order, so that causal
    attention costs the same on all ranks (Megatron-Core's convention for packed `thd` input). Padding is token 0.

    vision: architecture of the vision tower, for a vision-language model
    shares: keep the common prefix of sequences only once where that pays off (not with context parallelism)
    Raises ValueError for a rank out of range or a sample without a prompt (nothing predicts its first token).
    """
    if not 0 <= cp_rank < cp:
        raise ValueError(f"context-parallel rank {cp_rank} is not in 0..{cp - 1}")
    ids = torch.as_tensor(sample_ids, dtype=torch.int64)
    seq_lens, start = rollout.seq_lens[ids], starts(rollout.seq_lens)[ids]
    if bool((empty := rollout.prompt_lens[ids] < 1).any()):
        raise ValueError(f"samples {ids[empty].tolist()} have an empty prompt; add a BOS token to the prompts")
    align = sequence_align(cp)
    padded = (seq_lens + align - 1) // align * align
    unit = math.lcm(align, align_total)
    common = common_prefixes(rollout, sample_ids) if shares else torch.zeros_like(seq_lens)
    dummy = -int((padded - common).sum()) % unit if ids.numel() else unit
    if dummy:
        added = (padded, dummy), (common, 0), (seq_lens, 0), (start, 0), (ids, -1)
        padded, common, seq_lens, start, ids = (torch.cat([x, x.new_tensor([value])]) for x, value in added)
    sequence, offset = _local_positions(padded, cp, cp_rank)
    own = offset >= common[sequence]
    shared_index = _owners(own, padded[sequence - 1]) if bool(common.any()) else None
    sequence, offset = sequence[own], offset[own]
    source = start[sequence] + offset
    real = offset < seq_lens[sequence]
    tokens = rollout.tokens.new_zeros(offset.numel())
    tokens[real] = rollout.tokens[source[real]]
    inner = (offset + 1 < seq_lens[sequence]).nonzero()[:, 0]
    rows, dest = _rows(rollout, inner, ids[sequence[inner]], offset[inner])
    plain = PackedBatch(
        tokens=tokens[None],
        position_ids=offset[None],
        output_positions=rows,
        labels=rollout.tokens[source[rows] + 1],
        response_indices=dest,
        cu_seqlens=torch.cat([padded.new_zeros(1), padded.cumsum(0)]).to(torch.int32),
        max_seqlen=int(padded.max()),
        source=source.where(real, -1),
        samples=ids,
        seq_lens=seq_lens,
        shared_index=shared_index,
    )
    return plain if vision is None else _with_images(plain, rollout.pick(ids[ids >= 0]), vision, sequence, offset)


def _rows(rollout: Rollout, local: Tensor, sample: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the local positions whose next token is a counted response token, and that token's place among these.

    local, sample, offset [m]: positions whose next token belongs to the same sample, that sample, their places in it
    """
    if rollout.action_mask is None:
        number = offset + 1 - rollout.prompt_lens[sample]
        predicts = number >= 0
        dest = (starts(rollout.response_lens)[sample] + number)[predicts]
    else:
        source = starts(rollout.seq_lens)[sample] + offset
        predicts = rollout.action_mask[source + 1]
        dest = rollout.action_mask.cumsum(0)[source[predicts]]
    rows = local[predicts]
    if rollout.loss_weights is None:
        return rows, dest
    counted = rollout.loss_weights[dest] > 0
    return rows[counted], dest[counted]


def _with_images(
    plain: PackedBatch, part: Rollout, vision: VisionArch, sequence: Tensor, offset: Tensor
) -> PackedBatch:
    """Adds the images. part: the samples of the batch. sequence, offset: as `_local_positions` returns them."""
    places = image_positions(part, vision)
    real = offset < plain.seq_lens[sequence]
    source = (starts(plain.seq_lens)[sequence] + offset)[real]
    position_ids, feature = offset.new_zeros(3, offset.numel()), torch.full_like(offset, -1)
    position_ids[:, real], feature[real] = places.position_ids[:, source], places.feature[source]
    at = (feature >= 0).nonzero()[:, 0]
    return replace(
        plain, position_ids=position_ids, images=places.images, image_positions=at, image_feature_indices=feature[at]
    )


def _owners(own: Tensor, back: Tensor) -> Tensor:
    """Returns the index of the stored token that represents each token, [all] int64.

    own [all]: True if the token itself is stored; back [all]: otherwise, the distance to the earlier token that it
    equals
    """
    found = torch.arange(own.numel()) - torch.where(own, 0, back)
    while not bool(own[found].all()):
        found = found[found]
    return (own.cumsum(0) - 1)[found]


def _local_positions(padded: Tensor, cp: int, cp_rank: int) -> tuple[Tensor, Tensor]:
    """Returns (sequence [t], offset in the uncut padded sequence [t]) of every token that this rank holds."""
    local = padded // cp
    sequence = torch.repeat_interleave(torch.arange(padded.numel()), local)
    offset = torch.arange(int(local.sum())) - starts(local)[sequence]
    if cp == 1:
        return sequence, offset
    half = (local // 2)[sequence]
    second = offset >= half
    chunk = torch.where(second, 2 * cp - 1 - cp_rank, cp_rank)
    return sequence, chunk * half + offset - second * half
