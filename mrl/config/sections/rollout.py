"""Sampling: engines, the weights they get, validation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mrl.config.sections.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class SamplingConfig(Section):
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    max_new_tokens: PositiveInt = 1024
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


class RolloutConfig(Section):
    engine: Literal["sglang", "transformers"] = "sglang"
    urls: tuple[str, ...] = ()  # running engines; mrl starts its own when empty
    servers: PositiveInt = 1  # engines that mrl starts
    tensor: PositiveInt = 1  # tensor parallelism of each
    sampling: SamplingConfig = SamplingConfig()
    concurrent_requests: PositiveInt = 256  # in flight at once, over all engines
    deterministic: bool = True  # same (seed, step, sample) -> same tokens, whatever else is in the batch
    max_context_tokens: PositiveInt | None = None  # from the model's config when null
    max_running_requests: PositiveInt | None = None  # the engine's own batch limit; by the machine when null
    memory_fraction: Fraction = 0.7  # of GPU memory, for the engine's weights and KV cache
    startup_timeout_s: PositiveFloat = 300.0
    request_timeout_s: PositiveFloat = 600.0
    max_restarts: NonNegativeInt = 3  # of mrl's own engines in a run, when one dies or lets a request time out
    server_args: tuple[str, ...] = ()  # passed through to the engine's command line


class SyncConfig(Section):
    transport: Literal["auto", "shared_memory", "http", "distributed", "disk", "cuda_ipc"] = "auto"
    bucket_mib: PositiveInt = 512
    verify: Literal["off", "checksum"] = "off"
    timeout_s: PositiveFloat = 300.0


class ValidationConfig(Section):
    every_steps: PositiveInt = 10
    prompts: PositiveInt = 128
    temperature: NonNegativeFloat = 0.0
    at_start: bool = True
