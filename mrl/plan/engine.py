"""Memory of an engine's GPU: its weights, and the number of tokens in its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from mrl.config.engines import ENGINES
from mrl.config.fp8_shapes import ENGINE_BLOCK, is_engine_fp8
from mrl.config.sections.rollout import RolloutConfig
from mrl.families import FAMILIES, ModelArch
from mrl.families.adapters import LoRA, adapted_parts, adapter_table
from mrl.families.engine_cache import cache_bytes_a_token, cpu_requests, state_bytes
from mrl.families.engine_names import VOCAB_MULTIPLE
from mrl.families.table import weight_table

IN_FP8 = 1 + 4 / ENGINE_BLOCK**2  # bytes of a weight, including its share of a float32 scale


@dataclass(frozen=True)
class EnginePlan:
    """Plan of one GPU of one engine.

    gpus: GPUs of all engines, `tensor` each, by the trainer's rank numbers; higher numbers are beside the trainer;
    empty if engines have their own nodes
    weights, cache, workspace, context: bytes; token_bytes: of the cache a token; engines: of the run; tensor: GPUs of
    each; wanted: concurrent requests of an engine; context_tokens: of the longest; nodes: of each engine
    """

    engines: int
    tensor: int
    gpus: tuple[int, ...]
    weights: int
    cache: int
    token_bytes: int
    workspace: int
    context: int
    wanted: int
    context_tokens: int
    release: str
    nodes: int

    @property
    def cache_tokens(self) -> int:
        return self.cache // self.token_bytes

    @property
    def holds(self) -> int:
        """Requests of full length that the cache holds."""
        return self.cache_tokens // self.context_tokens

    def at(self, rank: int) -> int | None:
        """Returns the number of the engine on a rank's GPU, or None."""
        return self.gpus.index(rank) // self.tensor if rank in self.gpus else None

    def awake(self, weights: bool, cache: bool) -> int:
        """Returns the bytes while weights or cache must be loaded; parts that `release` does not free always count."""
        kept_weights = weights or self.release != "all"
        kept_cache = cache or self.release == "none"
        return self.context + (self.weights if kept_weights else 0) + (self.cache + self.workspace if kept_cache else 0)


@lru_cache(maxsize=64)
def weights_per_gpu(arch: ModelArch, tensor: int, dtype: int, *, quantized: bool = False) -> int:
    """Returns the bytes of an engine's weights on each of its `tensor` GPUs.

    SGLang shards matrices `tensor` ways, experts too, and rounds the vocabulary up. Norms and routers are replicated,
    and so are key-value heads if there are fewer than GPUs. dtype: bytes; quantized: the layers' matrices are in fp8.
    """
    total = 0.0
    for row in weight_table(arch).values():
        if row.copy_of is not None:
            continue
        if row.kind == "vocab" and FAMILIES[arch.family].engine_cuts_vocab:
            rows = -(-arch.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
            total += -(-rows // tensor) * arch.hidden_size * dtype
        elif row.kind == "vocab":
            total += prod(row.shapes[0]) * dtype
        elif row.kind == "qkv" and not row.groups:
            parts = (tensor, min(tensor, arch.num_kv_heads), min(tensor, arch.num_kv_heads))
            sizes = [rows * prod(row.shapes[0][1:]) for rows in row.pieces] or [prod(shape) for shape in row.shapes]
            whole = sum(size // part for size, part in zip(sizes, parts, strict=True))
            total += whole * (IN_FP8 if quantized and is_engine_fp8(row.hf[0], row.shapes[0]) else dtype)
        else:
            whole = sum(prod(shape) for shape in row.shapes)
            each = IN_FP8 if quantized and is_engine_fp8(row.hf[0], row.shapes[0]) else dtype
            is_cut = (row.tp_dim is not None or row.expert) and row.joined is None
            total += (whole // tensor if is_cut else whole) * each
    return int(total)


def adapters_per_gpu(arch: ModelArch, tensor: int, dtype: int, adapters: Sequence[LoRA]) -> int:
    """Returns the bytes of SGLang's room for adapters on each GPU.

    One more than the run has fit at once, each with the largest rank and on all layers that any of them adapts, as
    `mrl.inference.launch.started_with` asks for.
    """
    if not adapters:
        return 0
    parts = dict.fromkeys(part for lora in adapters for part in adapted_parts(arch, lora))
    rows = adapter_table(arch, "policy", LoRA(max(lora.rank for lora in adapters), 1.0, tuple(parts))).values()
    each = sum(prod(row.shapes[0]) // (tensor if row.tp_dim is not None else 1) for row in rows)
    return (1 + len(adapters)) * each * dtype


def plan_engine(
    arch: ModelArch,
    rollout: RolloutConfig,
    dtype: int,
    free: float | None,
    *,
    engines: int,
    gpus: tuple[int, ...],
    requests: int,
    longest: int,
    workspace: float,
    context: float,
    nodes: int = 1,
    adapters: Sequence[LoRA] = (),
) -> EnginePlan:
    """Returns the plan of an engine's GPU.

    free: bytes of the GPU when the engine starts; None: on CPUs. engines: of the run. requests: of a step, over all
    engines. adapters: of the run, if weight syncs send them
    """
    tensor = rollout.tensor
    weights = weights_per_gpu(arch, tensor, dtype, quantized=rollout.quantization == "fp8")
    weights += adapters_per_gpu(arch, tensor, dtype, adapters)
    at_once = -(-min(rollout.concurrent_requests, requests) // engines)
    running = min(at_once, rollout.max_running_requests or at_once)
    context_tokens = min(rollout.max_context_tokens or longest, longest)
    token_bytes = cache_bytes_a_token(arch, tensor, dtype)
    takes_a_share = "memory_fraction" not in ENGINES[rollout.engine].ignores
    needed = running * (context_tokens * token_bytes + state_bytes(arch))
    if free is None and takes_a_share:  # room for all requests in flight, from the start
        wanted = rollout.max_running_requests or -(-rollout.concurrent_requests // rollout.servers)
        cache = cpu_requests(arch, dtype, context_tokens, wanted) * context_tokens * token_bytes
    elif free is None:
        cache = needed
    elif takes_a_share:
        cache = max(0, int(rollout.memory_fraction * (free - context)) - weights)
    else:
        cache = min(max(0, int(free - context) - weights), needed)
    return EnginePlan(
        engines=engines,
        tensor=tensor,
        gpus=gpus,
        weights=weights,
        cache=cache,
        token_bytes=token_bytes,
        workspace=int(workspace),
        context=int(context),
        wanted=running,
        context_tokens=context_tokens,
        release=rollout.release,
        nodes=nodes,
    )
