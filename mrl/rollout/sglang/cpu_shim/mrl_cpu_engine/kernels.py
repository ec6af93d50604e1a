"""What the CPU path of sglang calls in sgl_kernel, in plain torch. Any other name raises when it is called."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_C1 = 0xCC9E2D51 - (1 << 32)
_C2 = 0x1B873593
_ADD = 0xE6546B64 - (1 << 32)
_FMIX1 = 0x85EBCA6B - (1 << 32)
_FMIX2 = 0xC2B2AE35 - (1 << 32)
_KEY_BYTES = 16
_LOOKED_UP = (  # when models that see pictures are imported, and never called for those that mrl serves
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache slots into its row: req_to_token[request, start:end] = the next end - start
    entries of out_cache_loc."""
    counts = (end_offset - start_offset).to(torch.int64)
    rows = req_pool_indices.to(torch.int64).repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    within = torch.arange(rows.numel()) - first.repeat_interleave(counts)
    columns = start_offset.to(torch.int64).repeat_interleave(counts) + within
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def murmur_hash32_cpu(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3_x86_32 (seed 0) of the 16 bytes (seed low, seed high, position, column).

    seed [n] uint64, positions [n], col_indices [m]; returns [n, m] uint32. All int32 arithmetic wraps, which is what
    the hash wants.
    """
    return hash_rows(seed, positions, scrambled(col_indices)).view(torch.uint32)


def hash_rows(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """`murmur_hash32_cpu` as int32, of `scrambled` columns."""
    words = seed.view(torch.int64).contiguous().view(torch.int32).view(-1, 2)  # little-endian: low word first
    h = _mix(torch.zeros(seed.shape[0], 1, dtype=torch.int32), scrambled(words[:, :1]))
    h = _mix(h, scrambled(words[:, 1:]))
    h = _mix(h, scrambled(positions)[:, None])
    h = _mix(h, columns[None, :])
    room = torch.empty_like(h)
    h.bitwise_xor_(_KEY_BYTES)
    _xor_shifted(h, 16, room)
    h.mul_(_FMIX1)
    _xor_shifted(h, 13, room)
    h.mul_(_FMIX2)
    _xor_shifted(h, 16, room)
    return h


def scrambled(words: Tensor) -> Tensor:
    """int32, of the shape of the integers: what the hash makes of a word before it meets the others."""
    word = words.to(torch.int32) * _C1
    return _rotate(word, 15, torch.empty_like(word)).mul_(_C2)


def _mix(state: Tensor, word: Tensor) -> Tensor:
    h = torch.bitwise_xor(state, word)
    return _rotate(h, 13, torch.empty_like(h)).mul_(5).add_(_ADD)


def _rotate(x: Tensor, bits: int, room: Tensor) -> Tensor:
    """To the left, in place; room: of the shape of x, overwritten."""
    high = torch.bitwise_left_shift(x, bits, out=room)
    return _shift_right(x, 32 - bits, x).bitwise_or_(high)


def _xor_shifted(x: Tensor, bits: int, room: Tensor) -> None:
    x.bitwise_xor_(_shift_right(x, bits, room))


def _shift_right(x: Tensor, bits: int, out: Tensor) -> Tensor:
    """Logical right shift of int32."""
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_((1 << (32 - bits)) - 1)


def _register() -> None:
    signature = "(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor"
    torch.library.define("sgl_kernel::murmur_hash32_cpu", signature)
    torch.library.impl("sgl_kernel::murmur_hash32_cpu", "CPU")(murmur_hash32_cpu)
    for name in _LOOKED_UP:
        torch.library.define(f"sgl_kernel::{name}", "(Tensor a, Tensor b) -> Tensor")


class KernelModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"sgl_kernel.{name}: no plain-torch form of it is in mrl's CPU engine shim")

        missing.__name__ = name
        return missing


def as_module(name: str) -> ModuleType:
    _register()
    module = KernelModule(name)
    module.__path__ = []
    module.__dict__["assign_req_to_token_pool_cpu"] = assign_req_to_token_pool_cpu
    return module
