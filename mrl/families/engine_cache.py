"""The size of an engine's KV cache."""

from __future__ import annotations

from mrl.families.arch import ModelArch

CPU_BYTES = 4 << 30  # of a server on CPUs, at most; it touches all of it when it starts
STATE_BYTES = 4  # of a number of such a state, float32
CPU_REQUESTS = 512  # in the batch of a server on CPUs, at most


def cache_bytes_a_token(arch: ModelArch, tensor: int, dtype: int) -> int:
    """Returns the bytes of one token's keys and values in all layers, on one of `tensor` devices.

    Args:
        dtype: bytes of a number.
    """
    (shared, a_head), heads = arch.cached_width, max(1, arch.num_kv_heads // tensor)
    return sum(not layer.delta for layer in arch.layers) * (shared + heads * a_head) * dtype


def state_bytes(arch: ModelArch) -> int:
    """Returns the bytes of one request's states of gated delta nets, which do not grow with its tokens."""
    if arch.delta is None:
        return 0
    delta, layers = arch.delta, sum(layer.delta for layer in arch.layers)
    return layers * STATE_BYTES * (delta.value_heads * delta.key * delta.value + delta.kernel * sum(delta.rows[:3]))


def cpu_requests(arch: ModelArch, dtype: int, context: int, wanted: int) -> int:
    """Returns how many requests a server on CPUs runs at once: as many of `wanted` as a cache of CPU_BYTES holds in
    full length, so that none is ever retracted.

    Args:
        dtype: bytes of a number.
        context: tokens of the longest request.
    """
    return max(1, min(wanted, CPU_REQUESTS, CPU_BYTES // (cache_bytes_a_token(arch, 1, dtype) * context)))
