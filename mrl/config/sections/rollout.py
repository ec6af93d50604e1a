"""Sections `rollout`, `sync` and `validation`: engines, weight syncs and validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mrl.config.engines import EngineName
from mrl.options.base import (
    FilePath,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
    Url,
)


class SamplingConfig(Section):
    """Sampling parameters of generation."""

    temperature: PositiveFloat = 1.0  # sampling temperature: logits are divided by it
    top_p: PositiveFraction = 1.0  # nucleus sampling: most likely tokens of this total probability
    top_k: int = -1  # sample from the k most likely tokens; -1: all
    max_new_tokens: PositiveInt = 1024  # maximum tokens of a response
    stop: tuple[str, ...] = ()  # texts that end a response, besides the end token; they remain part of it
    stop_token_ids: tuple[int, ...] = ()  # tokens that end a response


class MismatchConfig(Section):
    """Limits of the train / rollout mismatch: the mean |log-prob difference| between engine and trainer, in nats per
    token.

    Above a `stop` limit the run ends without training on the samples. bf16 gives about 0.03. null: no limit.

    `exact` applies to on-policy tokens when engines and trainer both compute in float32 on CPUs: they then differ only
    by the order of sums, about 1e-5.
    """

    warn: PositiveFloat | None = 0.2  # mean over the tokens of a step above which mrl warns
    stop: PositiveFloat | None = 1.0  # mean over the tokens of a step above which the run ends
    warn_sample: PositiveFloat | None = 1.0  # mean over the tokens of one response above which mrl warns
    stop_sample: PositiveFloat | None = 3.0  # mean over the tokens of one response above which the run ends
    exact: PositiveFloat | None = 1e-3  # mean over the on-policy tokens of a step above which the run ends
    exact_sample: PositiveFloat | None = 0.1  # mean over the on-policy tokens of a response above which the run ends


class RolloutConfig(Section):
    """The engines that generate responses."""

    engine: EngineName = "sglang"  # SGLang, or mrl's small server around transformers' generate
    urls: tuple[Url, ...] = ()  # addresses of running engines; mrl starts its own when empty
    api_key_file: FilePath | None = None  # file with the API key of the engines at urls, readable by its owner only
    servers: PositiveInt = 1  # engines that mrl starts on each node
    tensor: PositiveInt = 1  # tensor parallelism of each engine; sglang only
    # GPU numbers on each machine, `tensor` for each server; null: from 0 on, shared with trainer ranks
    gpus: tuple[NonNegativeInt, ...] | None = None
    # what colocated engines release while the models compute (sleep mode). cache: KV cache and CUDA graphs; all: also
    # the weights, which the next weight sync restores
    release: Literal["none", "cache", "all"] = "none"
    # asynchronous training: how many steps before their training samples may be generated. 0: synchronous, on-policy;
    # 1: engines generate the next batch while the current one is trained on
    max_staleness: NonNegativeInt = 0
    # when responses in flight end early and continue with the next weights. at_sync: in-flight weight updates, with
    # max_staleness; at_step_end: partial rollouts; never: a weight sync waits for them
    interrupt: Literal["never", "at_sync", "at_step_end"] = "never"
    # fifo: a step trains on the groups that started first; first_done: on those that end first, which prefers short
    # responses at the beginning
    order: Literal["fifo", "first_done"] = "fifo"
    # number of parts in which log-probs and values of a step are computed, each as soon as its samples are complete,
    # while engines generate the others; null: one pass over all samples
    early_passes: Annotated[int, Field(ge=2, le=64)] | None = None
    # with interrupt: at_step_end, tokens generated at a time: responses then end early by their length and not by time,
    # so that runs are repeatable; null: they end early as soon as enough groups are finished
    segment_tokens: PositiveInt | None = None
    # with interrupt: at_step_end, groups in flight as a multiple of the groups that a step trains on
    oversample: Annotated[float, Field(ge=1, le=16)] = 1.0
    sampling: SamplingConfig = SamplingConfig()
    concurrent_requests: PositiveInt = 256  # responses in flight at once, over all engines
    # batch-invariant sampling: the same (seed, step, sample) gives the same tokens, whatever else is in the batch;
    # slower on GPUs
    deterministic: bool = True
    # context length: prompt and response together; null: the longest that the run can request (data.max_prompt_tokens
    # and rollout.sampling.max_new_tokens, or agent.max_tokens)
    max_context_tokens: PositiveInt | None = None
    # maximum requests in an engine's running batch; null: chosen for the machine
    max_running_requests: PositiveInt | None = None
    # OpenMP threads of each engine on a CPU; null: 1 for models under 20M parameters or with tensor > 1, else an equal
    # share of the cores, without one core for each rank that trains meanwhile
    threads: PositiveInt | None = None
    # share of the GPU memory that is free at the engine's start, for its weights and KV cache; sglang only
    memory_fraction: Fraction = 0.7
    # fp8: weight syncs round the layers' matrices to e4m3 in blocks of 128 x 128, and engines compute in fp8; sglang on
    # GPUs only. algorithm.rollout_correction can correct for the mismatch
    quantization: Literal["none", "fp8"] = "none"
    startup_timeout_s: PositiveFloat = 300.0  # maximum seconds until an engine responds
    request_timeout_s: PositiveFloat = 600.0  # maximum seconds of one request
    max_restarts: NonNegativeInt = 3  # restarts of mrl's own engines per run, after a crash or a request timeout
    mismatch: MismatchConfig = MismatchConfig()
    server_args: tuple[str, ...] = ()  # further arguments for SGLang's command line

    gone: ClassVar[Mapping[str, str]] = {
        "overlap": "none is max_staleness: 0, one_step is max_staleness: 1, and bounded is interrupt: at_sync"
    }

    @property
    def is_behind(self) -> bool:
        """True if samples may come from older weights than those being trained (off-policy)."""
        return self.max_staleness > 0 or self.interrupt == "at_step_end"

    @classmethod
    def present_names(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the section of an older checkpoint in the present keys."""
        if "overlap" not in given:
            return dict(given)
        staleness = {"none": 0, "one_step": 1, "bounded": given.get("max_staleness") or 0}[given["overlap"]]
        interrupt = "at_sync" if given["overlap"] == "bounded" else "never"
        if given.get("segment_tokens") is not None:
            interrupt = "at_step_end"
        return {**given, "max_staleness": staleness, "interrupt": interrupt}


class DeltaSyncConfig(Section):
    """Delta weight sync: only the elements that changed since the last sync are sent. Each sender keeps a copy of the
    weights that it sends in host memory.
    """

    # every N-th sync sends the whole weights, like the first one and each one after a failure or a restart
    full_every: Annotated[int, Field(gt=1)] = 50


class SyncConfig(Section):
    """Weight sync (refit): how the engines receive the actor's weights."""

    # how weights reach the engines. auto: cuda_ipc or shared_memory within a machine, distributed between machines;
    # with the transformers engine shared_memory and http
    transport: Literal[
        "auto",
        "shared_memory",
        "http",
        "distributed",
        "disk",
        "cuda_ipc",
    ] = "auto"
    bucket_mib: PositiveInt = 512  # maximum MiB of weights sent at once
    # checksum: hash every tensor on both sides after a weight sync; a difference ends the run
    verify: Literal["off", "checksum"] = "off"
    # with actor.lora. merge: engines get whole weights with merged adapters; adapter: SGLang gets the adapters only and
    # applies them to the base model
    lora: Literal["merge", "adapter"] = "merge"
    delta: DeltaSyncConfig | None = None  # send changed elements only, by http or distributed; null: whole weights
    timeout_s: PositiveFloat = 300.0  # maximum seconds of one weight sync


class ValidationConfig(Section):
    """Validation on the prompts of data.validation: mean scores of all prompts and of each data.data_source_key.

    It has its own temperature, top_p and top_k; the other keys of rollout.sampling apply.
    """

    every_steps: PositiveInt = 10  # steps between validations
    prompts: PositiveInt | None = None  # use the first N prompts of data.validation; null: all
    samples_per_prompt: PositiveInt = 1  # responses per prompt
    temperature: NonNegativeFloat = 0.0  # logits are divided by it; 0: greedy
    top_p: PositiveFraction = 1.0  # nucleus sampling: most likely tokens of this total probability
    top_k: int = -1  # sample from the k most likely tokens; -1: all
    at_start: bool = True  # also validate before the first step
