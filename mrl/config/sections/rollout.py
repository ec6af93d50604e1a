"""Sampling: engines, the weights they get, validation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mrl.config.engines import EngineName
from mrl.config.sections.base import (
    FilePath,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Url,
)


class SamplingConfig(Section):
    """How responses are drawn."""

    temperature: PositiveFloat = 1.0  # logits are divided by it
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # only the likeliest tokens that together have this probability
    top_k: int = -1  # only the k likeliest tokens; -1: all
    max_new_tokens: PositiveInt = 1024  # tokens of a response, at most
    stop: tuple[str, ...] = ()  # texts that end a response, besides the end token; they stay in it
    stop_token_ids: tuple[int, ...] = ()  # tokens that end a response


class MismatchConfig(Section):
    """How far the engine's log-probs of sampled tokens may be from the trainer's: mean |difference| in nats a token.
    Beyond `stop` nothing is learnt from the samples and the run ends. bf16 gives about 0.03. null: no limit.

    `exact` is for tokens of the very weights that are trained, where engines and trainer compute in float32 on CPUs:
    what is left then is the order of sums, about 1e-5."""

    warn: PositiveFloat | None = 0.2  # in the mean of a step's tokens: a warning
    stop: PositiveFloat | None = 1.0  # in the mean of a step's tokens: the run ends
    warn_sample: PositiveFloat | None = 1.0  # in the mean of one response's tokens: a warning
    stop_sample: PositiveFloat | None = 3.0  # in the mean of one response's tokens: the run ends
    exact: PositiveFloat | None = 1e-3  # in the mean of a step's tokens of the weights of now: the run ends
    exact_sample: PositiveFloat | None = 0.1  # in the mean of one response's such tokens: the run ends


class RolloutConfig(Section):
    """The engines that sample."""

    engine: EngineName = "sglang"  # SGLang, or mrl's small server around transformers' generate
    urls: tuple[Url, ...] = ()  # running engines; mrl starts its own when empty
    api_key_file: FilePath | None = None  # the key that the engines at urls want: a file that its owner alone can read
    servers: PositiveInt = 1  # engines that mrl starts on each node
    tensor: PositiveInt = 1  # tensor parallelism of each; sglang only
    # GPUs of this machine, by number, tensor for each server; null: from 0 on, which ranks of the trainer have too
    gpus: tuple[NonNegativeInt, ...] | None = None
    # what the engines give up while the models compute. cache: KV cache and CUDA graphs; all: their weights too,
    # which the next push brings back. For engines on the trainer's GPUs
    release: Literal["none", "cache", "all"] = "none"
    # one_step: the samples of the next step are drawn while this one is learnt, by weights that are one step old.
    # bounded: responses go on over pushes of weights, and are learnt at most max_staleness steps after their beginning
    overlap: Literal["none", "one_step", "bounded"] = "none"
    max_staleness: NonNegativeInt | None = None  # of a token, in steps; with overlap: bounded
    # log-probs and values are computed in so many parts of a step, each as soon as all of its samples are there, while
    # engines draw the others; null: of all together, when all are there
    early_passes: Annotated[int, Field(ge=2, le=64)] | None = None
    # a response is drawn so many tokens at a time, and may go on in the next step, by the next weights; null: at once
    segment_tokens: PositiveInt | None = None
    # groups under way, times those that a step learns from; with segment_tokens
    oversample: Annotated[float, Field(ge=1, le=16)] = 1.0
    sampling: SamplingConfig = SamplingConfig()
    concurrent_requests: PositiveInt = 256  # responses in flight at once, over all engines
    # same (seed, step, sample) -> same tokens, whatever else is in the batch; on GPUs it costs speed
    deterministic: bool = True
    # prompt and response together; null: the longest that the run can ask for (data.max_prompt_tokens and
    # rollout.sampling.max_new_tokens, or agent.max_tokens)
    max_context_tokens: PositiveInt | None = None
    # requests in the engine's own batch, at most; by the machine when null
    max_running_requests: PositiveInt | None = None
    # OpenMP threads of each engine on a CPU; null: the cores that the ranks leave, shared among the engines, or 1 for
    # models under 20M parameters and with tensor > 1
    threads: PositiveInt | None = None
    # of the GPU memory that is free when the engine starts, for its weights and KV cache; sglang only
    memory_fraction: Fraction = 0.7
    # fp8: pushes round the layers' matrices to e4m3 in blocks of 128 x 128, and engines multiply in it; sglang only, on
    # GPUs. See algorithm.rollout_correction for what corrects it
    quantization: Literal["none", "fp8"] = "none"
    startup_timeout_s: PositiveFloat = 300.0  # seconds until an engine must answer
    request_timeout_s: PositiveFloat = 600.0  # seconds of one request
    max_restarts: NonNegativeInt = 3  # of mrl's own engines in a run, when one dies or lets a request time out
    mismatch: MismatchConfig = MismatchConfig()
    server_args: tuple[str, ...] = ()  # words for the end of SGLang's command line

    @property
    def is_behind(self) -> bool:
        """Whether samples may be of older weights than those that learn from them."""
        return self.overlap != "none" or self.segment_tokens is not None


class SyncConfig(Section):
    """How the actor's weights get to the engines."""

    # auto: cuda_ipc or shared_memory on this machine, distributed beyond it; with the transformers engine
    # shared_memory and http
    transport: Literal[
        "auto",
        "shared_memory",
        "http",
        "distributed",
        "disk",
        "cuda_ipc",
    ] = "auto"
    bucket_mib: PositiveInt = 512  # MiB of weights sent at once, at most
    # checksum: hash every tensor on both sides after a push; a difference ends the run
    verify: Literal["off", "checksum"] = "off"
    # with actor.lora. merge: engines get whole weights, the adapters in them; adapter: SGLang gets the adapters, and
    # computes with them beside the model that the run began with
    lora: Literal["merge", "adapter"] = "merge"
    timeout_s: PositiveFloat = 300.0  # seconds of one push


class ValidationConfig(Section):
    """Mean scores of held-out prompts, where data.validation has some: of all and of each data.data_source_key. The
    temperature, top_p and top_k of rollout.sampling have no effect on them."""

    every_steps: PositiveInt = 10  # steps between two of them
    prompts: PositiveInt | None = None  # the first of data.validation, at most; null: all
    samples_per_prompt: PositiveInt = 1  # responses to each prompt
    temperature: NonNegativeFloat = 0.0  # logits are divided by it; 0: the likeliest token each time
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # only the likeliest tokens that together have this probability
    top_k: int = -1  # only the k likeliest tokens; -1: all
    at_start: bool = True  # also before the first step
