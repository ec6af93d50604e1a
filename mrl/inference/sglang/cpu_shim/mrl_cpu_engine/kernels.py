"""Functions of sgl_kernel that SGLang's CPU path calls, in plain torch. Any other name raises when it is called."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint32]  # arithmetic wraps, which is what the hash wants
_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_FIVE, _ADD = np.uint32(5), np.uint32(0xE6546B64)
_FMIX1, _FMIX2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_KEY_BYTES = np.uint32(16)
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

    seed [n] uint64, positions [n], col_indices [m]; returns [n, m] uint32.
    """
    return hash_rows(seed, positions, scrambled(col_indices)).view(torch.uint32)


def hash_rows(seed: Tensor, positions: Tensor, columns: Words) -> Tensor:
    """`murmur_hash32_cpu` as int32, of `scrambled` columns. By numpy, which has shifts of unsigned integers, and a
    third of torch's time for them."""
    words = seed.view(torch.int64).contiguous().view(torch.int32).view(-1, 2)  # little-endian: low word first
    h = np.zeros(len(words), np.uint32)
    for word in (words[:, 0], words[:, 1], positions):
        h = _mix(h, scrambled(word))
    h = _mix(h[:, None], columns[None, :])
    h ^= _KEY_BYTES
    room = np.empty_like(h)
    for bits, factor in ((16, _FMIX1), (13, _FMIX2)):
        _xor_shifted(h, bits, room)
        h *= factor
    _xor_shifted(h, 16, room)
    return torch.from_numpy(h.view(np.int32))


def scrambled(words: Tensor) -> Words:
    """Returns the hash's form of each word before it is combined with the others; same shape as the integers."""
    word = words.to(torch.int32).numpy().view(np.uint32) * _C1
    return _rotated(word, 15) * _C2


def _mix(state: Words, word: Words) -> Words:
    h = _rotated(state ^ word, 13)
    h *= _FIVE
    h += _ADD
    return h


def _rotated(x: Words, bits: int) -> Words:
    """Rotates bits to the left; overwrites x."""
    high = x << np.uint32(bits)
    x >>= np.uint32(32 - bits)
    high |= x
    return high


def _xor_shifted(x: Words, bits: int, room: Words) -> None:
    np.right_shift(x, np.uint32(bits), out=room)
    x ^= room


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
