"""Protocol between mrl and an engine: the part of SGLang's native HTTP interface that mrl uses.

Bodies and answers are JSON. Prompts and responses are token ids, never text. Every request carries the run's key as
`Authorization: Bearer KEY`. Requests that change weights are answered with `{"success": true}`. An engine rejects a
request with a status of 400 to 499, or with 200 and `{"success": false}`; `message` holds the reason. An endpoint that
it does not have is answered with 404.

`EngineClient` has a method for each endpoint; `RequestDispatcher` sends GENERATE once for each sample. No other module
has these URLs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NotRequired, TypedDict, TypeVar

from mrl.inference.answers import field, shown, typed
from mrl.inference.errors import BadAnswer
from mrl.inference.server_info import ServerInfo, read_server_info

Answer = TypeVar("Answer")
LoadFormat = Literal["flattened_bucket", "mrl.inference.delta.load"]
MemoryPart = Literal["weights", "kv_cache", "cuda_graph"]
ADAPTED = ".base_layer."  # in the names of parameters of a layer that may have adapters
MEMORY_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache", "cuda_graph")
RELEASED_PARTS: dict[str, tuple[MemoryPart, ...]] = {  # by rollout.release
    "none": (),
    "cache": ("kv_cache", "cuda_graph"),
    "all": MEMORY_PARTS,
}


@dataclass(frozen=True)
class Endpoint(Generic[Answer]):
    """One endpoint of an engine.

    name: the path without its first slash
    read: converts the JSON answer, or None if there was none; raises BadAnswer if it is invalid
    """

    name: str
    read: Callable[[Any], Answer]
    method: Literal["GET", "POST"] = "POST"

    @property
    def path(self) -> str:
        """Path relative to the engine's address."""
        return f"/{self.name}"


# ---- requests


class SamplingBody(TypedDict):
    """Sampling parameters of one request. Greedy sampling has temperature 0."""

    temperature: float  # logits are divided by it
    top_p: float
    top_k: int  # -1: all
    min_p: float  # always 0, as the following ones until max_new_tokens: mrl does not use them
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float  # 1
    min_new_tokens: int
    max_new_tokens: int
    stop: list[str]  # texts, for engines with a tokenizer
    stop_token_ids: list[int]  # besides the model's own end tokens
    ignore_eos: bool  # false
    n: int  # 1
    sampling_seed: int  # of the sample's own random stream
    skip_special_tokens: bool
    no_stop_trim: bool  # the token or text that ends a response stays in it


class GenerateBody(TypedDict):
    """One prompt and its sampling parameters."""

    input_ids: list[int]
    rid: NotRequired[str]  # unique name of the request; its answer has it as `id`
    sampling_params: SamplingBody
    image_data: NotRequired[list[str]]  # the prompt's pictures, one image token each: data:image/png;base64
    return_logprob: NotRequired[bool]
    # with max_new_tokens 0: log-probs of the prompt's own tokens after this one, and how many of the most likely tokens
    # at each of their positions
    logprob_start_len: NotRequired[int]
    top_logprobs_num: NotRequired[int]
    return_routed_experts: NotRequired[bool]
    routed_experts_start_len: NotRequired[int]  # leading tokens of the prompt that are left out of that
    lora_path: NotRequired[str]  # the name of a loaded adapter; left out: the model without any


class TensorsBody(TypedDict):
    """Weights under Hugging Face names, in the request or in shared memory.

    serialized_named_tensors: one base64 pickle for each tensor-parallel rank of the engine, of [(name, tensor), ...]
    or, as "flattened_bucket", of {"flattened_tensor": uint8 tensor, "metadata": [...]}, or, for the delta loader, of
    [(message, changes)] (see mrl.inference.delta)
    """

    serialized_named_tensors: list[str]
    load_format: LoadFormat | None
    flush_cache: bool
    weight_version: str | None  # None: unchanged


class GroupBody(TypedDict):
    """Process group of one sender, which is its rank 0, and of the ranks of this engine."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


class BroadcastBody(TypedDict):
    """Weights that rank 0 of the group broadcasts. dtypes like "float32". `flush_cache: false` comes with it."""

    names: list[str]
    dtypes: list[str]
    shapes: list[Sequence[int]]
    group_name: str
    load_format: LoadFormat | None


class DiskBody(TypedDict):
    """Loading of all weights from a Hugging Face directory that the engine's machine can read."""

    model_path: str
    load_format: Literal["auto"]  # without it a server that started with random weights would refuse to read any
    weight_version: str
    flush_cache: bool


class AdapterBody(TypedDict):
    """A LoRA adapter for the engine's model.

    lora_name: a new name; config_dict: as in PEFT's adapter_config.json
    serialized_named_tensors: one base64 pickle for each tensor-parallel rank of the engine, of {name: whole tensor}
    expected_checksums: SHA-256 of the tensors' bytes in hex, by name; an engine that computes others exits
    """

    lora_name: str
    config_dict: dict[str, Any]
    serialized_named_tensors: list[str]
    expected_checksums: dict[str, str] | None


class MemoryBody(TypedDict):
    """Parts of an idle engine's GPU memory to release or to restore; restored contents are undefined, except CUDA
    graphs. An engine may end if a part is released twice, or restored without having been released."""

    tags: list[MemoryPart]


# ---- answers


class MetaInfo(TypedDict):
    """Metadata of one sample."""

    id: NotRequired[str]  # as the request was named
    finish_reason: Any  # {"type": "stop" | "length" | "abort", ...}
    prompt_tokens: int
    completion_tokens: int
    weight_version: str
    # base64 of int32 [tokens of prompt and response - 1, layers, experts a token]: which experts each token but the
    # last went to, 0 in layers without experts; without the first routed_experts_start_len tokens
    routed_experts: NotRequired[str]
    output_token_logprobs: list[Any]  # [log-prob, token, null] of each token: of logits / temperature, unfiltered
    # as output_token_logprobs, of the prompt's tokens from logprob_start_len on, at temperature 1. The first one has no
    # log-prob. input_top_logprobs: a list of such for each, null for the first
    input_token_logprobs: NotRequired[list[Any]]
    input_top_logprobs: NotRequired[list[Any]]


class Generated(TypedDict):
    """One sample, including the token that ended it; read by `mrl.inference.samples.read_answer`."""

    output_ids: list[int]
    meta_info: MetaInfo


@dataclass(frozen=True)
class ModelInfo:
    """Description of the model that an engine serves."""

    model_path: str
    model_type: str
    weight_version: str


@dataclass(frozen=True)
class RankChecksums:
    """One engine process: its tensor-parallel rank and the hash of each of its own (fused, sharded) parameters."""

    tp_rank: int
    tp_size: int
    checksums: dict[str, str]


def read_done(answer: Any) -> None:
    """Checks that an answer confirms success: a proxy that answers 200 to everything does not."""
    if typed(answer, "the answer", dict).get("success") is not True:
        raise BadAnswer(f"the answer is {shown(answer)}, which does not say that it was done (success)")


def read_nothing(answer: Any) -> None:
    """Accepts any answer: only the status counts."""


def read_model_info(answer: Any) -> ModelInfo:
    return ModelInfo(*(field(answer, name, str) for name in ("model_path", "model_type", "weight_version")))


def read_workers(answer: Any) -> tuple[str, ...]:
    """Returns the engines behind a router. sglang-router has had two forms of this answer."""
    if isinstance(answer, dict) and "workers" in answer:
        return tuple(field(worker, "url", str) for worker in field(answer, "workers", list))
    return tuple(typed(url, "one of urls", str) for url in field(answer, "urls", list))


def read_adapters(answer: Any) -> tuple[str, ...]:
    """Returns the names of all loaded adapters."""
    return tuple(field(answer, "loaded_adapters", dict))


def read_checksums(answer: Any) -> list[RankChecksums]:
    """Returns the hashes in the order of the engine's tensor-parallel ranks. Names are those of a model without
    adapters, around whose layers SGLang puts others."""
    found = []
    for rank in field(answer, "ranks", list):
        checksums = field(rank, "checksums", dict)
        info = rank.get("parallelism_info")
        place = info[0] if isinstance(info, list) and info else info
        if not set(map(type, checksums.values())) <= {str}:
            raise BadAnswer(f"checksums is {shown(checksums)}, expected texts by name")
        plain = {name.replace(ADAPTED, "."): digest for name, digest in checksums.items()}
        found.append(RankChecksums(field(place, "tp_rank", int), field(place, "tp_size", int), plain))
    return sorted(found, key=lambda rank: rank.tp_rank)


# ---- the endpoints, with the bodies of their requests

MODEL_INFO = Endpoint[ModelInfo]("model_info", read_model_info, "GET")
SERVER_INFO = Endpoint[ServerInfo]("server_info", read_server_info, "GET")
GENERATE = Endpoint[Any]("generate", lambda answer: answer)  # GenerateBody; the answer is a Generated
ABORT = Endpoint[None]("abort_request", read_nothing)  # {"rid": "", "abort_all": true}
FLUSH_CACHE = Endpoint[None]("flush_cache", read_nothing)
# {"selector": "all"}: all models of the engine; {}. No token is sampled between the two
BEGIN_UPDATE = Endpoint[None]("begin_weight_update", read_done)
END_UPDATE = Endpoint[None]("end_weight_update", read_done)
UPDATE_FROM_TENSOR = Endpoint[None]("update_weights_from_tensor", read_done)  # TensorsBody
JOIN_GROUP = Endpoint[None]("init_weights_update_group", read_done)  # GroupBody
UPDATE_FROM_BROADCAST = Endpoint[None]("update_weights_from_distributed", read_done)  # BroadcastBody
LEAVE_GROUP = Endpoint[None]("destroy_weights_update_group", read_done)  # {"group_name": a group that it has joined}
UPDATE_FROM_DISK = Endpoint[None]("update_weights_from_disk", read_done)  # DiskBody
LOAD_ADAPTER = Endpoint[tuple[str, ...]]("load_lora_adapter_from_tensors", read_adapters)  # AdapterBody
UNLOAD_ADAPTER = Endpoint[None]("unload_lora_adapter", read_done)  # {"lora_name": a loaded adapter}, once it is unused
# {"new_version": of the weights, "abort_all_requests": false}
UPDATE_VERSION = Endpoint[None]("update_weight_version", read_done)
RELEASE_MEMORY = Endpoint[None]("release_memory_occupation", read_nothing)  # MemoryBody, as the next
RESUME_MEMORY = Endpoint[None]("resume_memory_occupation", read_nothing)
CHECKSUMS = Endpoint[list[RankChecksums]]("weights_checker", read_checksums)  # {"action": "checksum"}: of parameters
# an engine has neither of these: 404
ROUTER_WORKERS = Endpoint[tuple[str, ...]]("workers", read_workers, "GET")
OLD_ROUTER_WORKERS = Endpoint[tuple[str, ...]]("list_workers", read_workers, "GET")
