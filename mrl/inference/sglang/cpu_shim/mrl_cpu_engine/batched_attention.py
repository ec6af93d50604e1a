"""torch_native attention of a whole batch in one padded scaled_dot_product_attention call.

The stock backend calls it once a request and layer, which costs more than the model itself when the model is small.
Here keys and values of all requests are gathered into [batch, longest, heads, dim] with a mask; the gather plan
depends only on the batch, so it is made once a forward and reused by all layers. Very large batches are cut into
groups of requests so that the score matrix stays below MAX_SCORES. Where `mrl.kernels.native` is there it computes each
new token by itself and gathers nothing: a token's bits depend neither on the batch nor on what was cached before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from mrl.kernels import native as kernels
from mrl.kernels.native import engine as native

MAX_SCORES = 1 << 26  # elements of batch x heads x queries x keys in one call
Plan = Callable[[dict[str, Any]], "list[Group]"]  # of the stock method's arguments by name


@dataclass(frozen=True)
class Group:
    """Some consecutive requests (b of them) of a batch, padded to q queries and k keys.

    requests, tokens: the slices they take in per-request and per-query-token arrays
    cache_index [b * k]: their slots in the KV cache (slot 0 where padded)
    query_index [b, q] bool: which padded query places hold tokens; None while decoding (one query each)
    mask [b, 1, q, k] bool, or None where every query may see every key
    """

    requests: slice
    tokens: slice
    size: int
    keys: int
    cache_index: Tensor
    query_index: Tensor | None
    mask: Tensor | None


def install(module: Any) -> None:
    """Replace the two attention methods of TorchNativeAttnBackend; cross attention keeps the stock ones."""
    backend = module.TorchNativeAttnBackend
    stock_init = backend.init_forward_metadata

    def init_forward_metadata(self: Any, forward_batch: Any) -> Any:
        self.batched_plans = {}
        return stock_init(self, forward_batch)

    backend.init_forward_metadata = init_forward_metadata
    backend._run_sdpa_forward_decode = _batched(backend._run_sdpa_forward_decode, _plan_decode, _attend_decode)
    backend._run_sdpa_forward_extend = _batched(backend._run_sdpa_forward_extend, _plan_extend, _attend_extend)


def _batched(stock: Callable[..., Tensor], make_plan: Plan, attend: Callable[..., None]) -> Callable[..., Tensor]:
    """Returns a method with the arguments of `stock`."""
    takes = inspect.signature(stock).parameters
    names = [*takes][1:]
    defaults = {name: each.default for name, each in takes.items() if each.default is not each.empty}

    def run(self: Any, *args: Any, **kw: Any) -> Tensor:
        given = defaults | dict(zip(names, args)) | kw  # a signature's own `bind` takes ten times as long
        is_extend = make_plan is _plan_extend
        if given["encoder_lens"] is not None or given["is_cross_attn"] or (is_extend and not given["causal"]):
            return stock(self, *args, **kw)
        plans = self.__dict__.setdefault("batched_plans", {})
        if kernels.supports_float32_tensors(given["query"], given["k_cache"], given["v_cache"]):
            if make_plan not in plans:
                plans[make_plan] = new_tokens(given, is_extend)
            return _attend_by_token(given, *plans[make_plan])
        key = (make_plan, given["sliding_window_size"])
        if key not in plans:
            plans[key] = make_plan(given)
        for group in plans[key]:
            attend(group, given["query"], given["output"], given["k_cache"], given["v_cache"], given["scaling"])
        return given["output"]

    return run


def new_tokens(given: dict[str, Any], is_extend: bool) -> tuple[Tensor, Tensor]:
    """Returns the number of the request of each new token, and the number of keys that it attends to, both [tokens].
    `given`: arguments of the stock method."""
    lengths = given["seq_lens"].long()
    requests = torch.arange(len(lengths))
    if not is_extend:
        return requests, lengths
    new, before = given["extend_seq_lens"].long(), given["extend_prefix_lens"].long()
    within = torch.arange(int(new.sum())) - (new.cumsum(0) - new).repeat_interleave(new)
    return requests.repeat_interleave(new), before.repeat_interleave(new) + within + 1


def _attend_by_token(given: dict[str, Any], requests: Tensor, lengths: Tensor) -> Tensor:
    query, output, scaling = given["query"], given["output"], given["scaling"]
    cache = (query, given["k_cache"], given["v_cache"], given["req_to_token"])
    rows, out = given["req_pool_indices"][requests], output
    if not native.supports_decode_attention(*cache):
        cache, rows = _gathered(given, requests)
        out = query.new_empty(*output.shape[:2], cache[2].size(-1))
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    window = given["sliding_window_size"]
    native.decode_attention(*cache, rows, lengths, out, window=window, scale=scale)
    return output if out is output else output.copy_(out[..., : output.size(-1)])


def _gathered(given: dict[str, Any], requests: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Returns query, keys, values and slots of the batch in a form that the kernel supports (latent vectors are keys
    and values at once, and of any width), and the row of slots of each new token."""
    lens = given["seq_lens"].long()
    longest = int(lens.max())
    table = given["req_to_token"][given["req_pool_indices"].long(), :longest].long()
    at = table[torch.arange(longest) < lens[:, None]]
    tensors = (given["query"], given["k_cache"][at], given["v_cache"][at])
    query, key, value = (pad(x, (0, -x.size(-1) % kernels.WIDTH)) for x in tensors)
    slots = torch.arange(len(at) + longest, dtype=torch.int32).as_strided((len(at), longest), (1, 1))
    return (query, key, value.contiguous(), slots), (lens.cumsum(0) - lens)[requests]


def _plan_decode(given: dict[str, Any]) -> list[Group]:
    table = given["req_to_token"][given["req_pool_indices"].long()]
    return plan_decode(table, given["seq_lens"], given["sliding_window_size"], given["query"].shape[1])


def _plan_extend(given: dict[str, Any]) -> list[Group]:
    table, window = given["req_to_token"][given["req_pool_indices"].long()], given["sliding_window_size"]
    before, new = given["extend_prefix_lens"], given["extend_seq_lens"]
    return plan_extend(table, given["seq_lens"], before, new, window, given["query"].shape[1])


def _spans(requests: int, scores_each: int) -> list[tuple[int, int]]:
    step = max(1, MAX_SCORES // max(1, scores_each))
    return [(start, min(start + step, requests)) for start in range(0, requests, step)]


def plan_decode(table: Tensor, seq_lens: Tensor, window: int | None, heads: int) -> list[Group]:
    """table [requests, context]: cache slots; seq_lens [requests]: keys of each, the current token included."""
    groups = []
    for start, end in _spans(seq_lens.numel(), int(seq_lens.max()) * heads):
        lens = seq_lens[start:end].long()
        keys = int(lens.max())
        place = torch.arange(keys)
        live = place < lens[:, None]
        if window is not None and window > -1:
            live = live & (place >= (lens - 1 - window)[:, None])
        index = table[start:end, :keys].long().masked_fill(~live, 0).flatten()
        mask = None if bool(live.all()) else live[:, None, None, :]
        span = slice(start, end)
        groups.append(Group(span, span, end - start, keys, index, None, mask))
    return groups


def plan_extend(
    table: Tensor, seq_lens: Tensor, prefix_lens: Tensor, query_lens: Tensor, window: int | None, heads: int
) -> list[Group]:
    """prefix_lens + query_lens = seq_lens [requests]; query tokens of all requests follow one another."""
    ends = query_lens.long().cumsum(0).tolist()
    groups = []
    for start, end in _spans(seq_lens.numel(), int(query_lens.max()) * int(seq_lens.max()) * heads):
        lens, new, before = seq_lens[start:end].long(), query_lens[start:end].long(), prefix_lens[start:end].long()
        keys, queries = int(lens.max()), int(new.max())
        place = torch.arange(keys)
        live = place < lens[:, None]
        position = before[:, None] + torch.arange(queries)  # of each padded query in its sequence
        mask = live[:, None, :] & (place <= position[:, :, None])
        if window is not None and window > -1:
            mask &= place >= (position - window)[:, :, None]
        query_index = torch.arange(queries) < new[:, None]
        mask |= ~query_index[:, :, None]  # padded queries see everything: no row without a key, no NaN
        tokens = slice(ends[start - 1] if start else 0, ends[end - 1])
        index = table[start:end, :keys].long().masked_fill(~live, 0).flatten()
        groups.append(Group(slice(start, end), tokens, end - start, keys, index, query_index, mask[:, None]))
    return groups


def _gather(cache: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    """[slots, heads, dim] -> [b, heads, k, dim]"""
    rows = cache.flatten(1).index_select(0, group.cache_index)
    return rows.view(group.size, group.keys, *cache.shape[1:]).transpose(1, 2).to(dtype)


def _attend_decode(
    group: Group, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, scaling: float | None
) -> None:
    """query, output [requests, heads, dim]. Query heads that share a key head become its queries: nothing is
    repeated."""
    key, value = _gather(k_cache, group, query.dtype), _gather(v_cache, group, query.dtype)
    heads, kv_heads = query.shape[1], key.shape[1]
    folded = query[group.tokens].view(group.size, kv_heads, heads // kv_heads, -1)
    mask = None if group.mask is None else group.mask.expand(-1, 1, heads // kv_heads, -1)
    out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    output[group.tokens] = out.reshape(group.size, heads, -1)


def _attend_extend(
    group: Group, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, scaling: float | None
) -> None:
    assert group.query_index is not None
    key, value = _gather(k_cache, group, query.dtype), _gather(v_cache, group, query.dtype)
    padded = query.new_zeros(*group.query_index.shape, *query.shape[1:])
    padded[group.query_index] = query[group.tokens]
    out = scaled_dot_product_attention(
        padded.transpose(1, 2), key, value, attn_mask=group.mask, scale=scaling, enable_gqa=True
    )
    output[group.tokens] = out.transpose(1, 2)[group.query_index]
