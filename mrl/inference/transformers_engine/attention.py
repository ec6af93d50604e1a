"""Attention on CPUs whose bits depend on a token's own sequence alone: neither on the batch nor on its padding.

Each new token attends by itself (`mrl.kernels.native`), or, where that kernel is not supported, each sequence does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mrl.kernels import native
from mrl.kernels.native.engine import decode_attention, supports_decode_attention

NAME = "mrl_batch_invariant"


def install(model: Any) -> None:
    """Has a model on a CPU use it, and experts that are multiplied one by one."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, key_ranges)
    model.set_attn_implementation(NAME)
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")


def key_ranges(*args: Any, **settings: Any) -> Tensor:
    """Returns what takes the place of a mask, [batch, queries, 2] int64: the first key that each query attends to, and
    the number of keys; 0 for a query that is padding. Takes what `sdpa_mask` takes."""
    mask = sdpa_mask(*args, **settings | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert mask is not None
    seen = mask[:, 0]
    return torch.stack([seen.int().argmax(-1), seen.sum(-1)], -1)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        query: [batch, heads, queries, d]; key, value: [batch, key heads, keys, d], [batch, key heads, keys, dv]
        attention_mask: of `key_ranges`; None: a picture's patches, all of which attend to each other
        s_aux: [heads], sinks

    Returns:
        [batch, queries, heads, dv], None
    """
    assert softcap is None and dropout == 0
    if attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **settings)
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    if s_aux is None and supports_decode_attention(*_cache(query[..., :1, :], key[..., :1, :], value[..., :1, :])):
        return _by_token(query, key, value, attention_mask, scale), None
    out = query.new_zeros(query.size(0), query.size(2), query.size(1), value.size(-1))
    for own, sequence in enumerate(zip(query, key, value, attention_mask)):
        _of_sequence(*sequence, scale, s_aux, out[own])
    return out, None


def _cache(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns queries [batch * queries, heads, d], keys and values [batch * keys, key heads, d] with channels padded by
    zeros to what the kernel takes, and slots [batch * keys, keys]: row n has the slots from n on."""
    tokens = [
        functional.pad(x.transpose(1, 2), (0, -x.size(-1) % native.WIDTH)).flatten(0, 1) for x in (query, key, value)
    ]
    keys = key.size(2)
    slots = torch.arange(len(tokens[1]) + keys, dtype=torch.int32).as_strided((len(tokens[1]), keys), (1, 1))
    return tokens[0].contiguous(), tokens[1].contiguous(), tokens[2].contiguous(), slots


def _by_token(query: Tensor, key: Tensor, value: Tensor, ranges: Tensor, scale: float) -> Tensor:
    queries, keys, values, slots = _cache(query, key, value)
    first, count = ranges.unbind(-1)
    rows = first + key.size(2) * torch.arange(len(first))[:, None]
    out = queries.new_empty(*queries.shape[:2], values.size(-1))
    lengths = count.clamp(min=1).flatten()  # of padding, any key
    decode_attention(queries, keys, values, slots, rows.flatten(), lengths, out, window=None, scale=scale)
    return out[..., : value.size(-1)].reshape(*first.shape, query.size(1), -1)


def _of_sequence(
    query: Tensor, key: Tensor, value: Tensor, ranges: Tensor, scale: float, sinks: Tensor | None, out: Tensor
) -> None:
    """Writes the attention of one sequence, whose padding is on the left, to out [queries, heads, dv]."""
    own = int((ranges[:, 1] > 0).sum())
    first, count = ranges[-own:].unbind(-1)
    start = int(first.min())
    place = torch.arange(start, key.size(1))
    mask = (place >= first[:, None]) & (place < (first + count)[:, None])
    share = query.size(0) // key.size(0)
    query = query[:, -own:]
    key, value = (x[:, start:].repeat_interleave(share, 0) for x in (key, value))
    if sinks is None:
        made = scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask, scale=scale)[0]
    else:
        scores = (query @ key.mT * scale).masked_fill(~mask, -torch.inf)
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, own, 1)], -1).float().softmax(-1)
        made = scores[..., :-1].to(value.dtype) @ value
    out[-own:] = made.transpose(0, 1)
