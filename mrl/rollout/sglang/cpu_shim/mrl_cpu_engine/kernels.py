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


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _rotate(x: Tensor, bits: int) -> Tensor:
    return (x << bits) | _shift_right(x, 32 - bits)


def _mix(state: Tensor, block: Tensor) -> Tensor:
    block = _rotate(block * _C1, 15) * _C2
    return _rotate(state ^ block, 13) * 5 + _ADD


def murmur_hash32_cpu(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3_x86_32 (seed 0) of the 16 bytes (seed low, seed high, position, column).

    seed [n] uint64, positions [n], col_indices [m]; returns [n, m] uint32. All int32 arithmetic wraps, which is what
    the hash wants.
    """
    words = seed.view(torch.int64).contiguous().view(torch.int32).view(-1, 2)  # little-endian: low word first
    h = _mix(torch.zeros(seed.shape[0], 1, dtype=torch.int32), words[:, :1])
    h = _mix(h, words[:, 1:])
    h = _mix(h, positions.to(torch.int32)[:, None])
    h = _mix(h, col_indices.to(torch.int32)[None, :])
    h ^= _KEY_BYTES
    h ^= _shift_right(h, 16)
    h *= _FMIX1
    h ^= _shift_right(h, 13)
    h *= _FMIX2
    h ^= _shift_right(h, 16)
    return h.view(torch.uint32)


def _register() -> None:
    signature = "(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor"
    torch.library.define("sgl_kernel::murmur_hash32_cpu", signature)
    torch.library.impl("sgl_kernel::murmur_hash32_cpu", "CPU")(murmur_hash32_cpu)


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
