"""Settings that a server reports, and reasons why a run cannot use it. Written against sglang 0.5.23."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mrl.inference.answers import from_json, maybe, typed
from mrl.inference.delta import LOADER

BEYOND_INPUT = 4  # tokens of prompt and response that SGLang has room for, beyond its max_req_input_len


@dataclass(frozen=True)
class ServerInfo:
    """Settings of an engine, as reported by its /server_info."""

    device: str  # "cpu" if the server does not report one
    is_deterministic: bool  # the same seed gives the same tokens in any batch
    has_tokenizer: bool  # stop strings work
    checksum: Literal["sha256", "tiles"] = "sha256"  # of weights: of the bytes, or "tiles", as SGLang on a GPU
    releases_memory: bool | None = None  # it can release GPU memory; None if it does not know the option
    returns_experts: bool = False  # it can return routed experts
    has_prefix_cache: bool = False  # it keeps the KV cache of prompts for later requests
    dtype: str = ""  # compute dtype, such as "float32"; "" if unknown, or if weights or KV cache are quantized
    tensor: int | None = None  # tensor-parallel size; None if unknown
    stages: int = 1  # pipeline-parallel size
    copies: int = 1  # data-parallel size
    room: int | None = None  # maximum tokens of prompt and response together; None if unknown
    rounds_weights: str = ""  # quantization of its weights, such as "fp8"; "" if none
    own_sampling: frozenset[str] = frozenset()  # sampling parameters for which the server has its own defaults
    drafts: str = ""  # method of speculative decoding, such as "EAGLE"; "" if off
    drafts_exactly: bool = True  # speculative decoding does not change the distribution of samples
    loads_deltas: bool = False  # it has mrl's loader of weight deltas

    def hindrances(self, tensor: int | None, quantization: str, asked: Collection[str]) -> Iterator[str]:
        """Yields reasons why a run cannot use this server, with what to change.

        tensor: required tensor-parallel size, if known; quantization: of synced weights, "none" or "fp8"; asked:
        sampling parameters that every request sets
        """
        if None not in (tensor, self.tensor) and tensor != self.tensor:
            yield (
                f"it has {self.tensor} tensor-parallel ranks and was to have rollout.tensor = {tensor}: is one of "
                "rollout.server_args the cause?"
            )
        if self.stages > 1:
            yield f"its model is cut into {self.stages} stages (--pp-size), which no sync can reach: use --tp-size"
        if self.copies > 1:
            yield f"it has {self.copies} copies of the model (--dp-size) and takes no syncs: start as many servers"
        if self.rounds_weights and quantization == "none":
            yield f"it rounds its weights to {self.rounds_weights}, and syncs bring them as they are: --quantization"
        if left := sorted(self.own_sampling - set(asked)):
            yield f"it draws by its own {', '.join(left)} (--preferred-sampling-params), of which no log-prob tells"
        if not self.drafts_exactly:
            yield (
                f"it takes guesses ({self.drafts}) that the model would not draw, of which no log-prob tells: "
                "--speculative-accept-threshold-single and -acc must be 1"
            )


UNCHECKED = ServerInfo(device="cpu", is_deterministic=False, has_tokenizer=True)


def read_server_info(answer: Any) -> ServerInfo:
    info = typed(answer, "the answer", dict)
    rounds = maybe(info, "quantization", str) or maybe(info, "torchao_config", str) or ""
    is_plain = not rounds and maybe(info, "kv_cache_dtype", str) in (None, "auto")
    longest = maybe(info, "max_req_input_len", int)
    thresholds = [info.get(f"speculative_accept_threshold_{kind}") for kind in ("single", "acc")]
    drafts = maybe(info, "speculative_algorithm", str) or ""
    preferred = info.get("preferred_sampling_params")  # older servers report them as text of JSON
    preferred = from_json(preferred.encode()) if isinstance(preferred, str) else preferred
    device, has_own = maybe(info, "device", str) or "cpu", maybe(info, "weights_checksum", str) == "sha256"
    return ServerInfo(
        device=device,
        checksum="tiles" if device.startswith("cuda") and not has_own else "sha256",
        is_deterministic=maybe(info, "enable_deterministic_inference", bool) or False,
        has_tokenizer=not maybe(info, "skip_tokenizer_init", bool),
        releases_memory=maybe(info, "enable_memory_saver", bool),
        returns_experts=maybe(info, "enable_return_routed_experts", bool) or False,
        has_prefix_cache=maybe(info, "disable_radix_cache", bool) is False,
        dtype=(maybe(info, "dtype", str) or "") if is_plain else "",
        tensor=maybe(info, "tp_size", int),
        stages=maybe(info, "pp_size", int) or 1,
        copies=maybe(info, "dp_size", int) or 1,
        room=None if longest is None else longest + BEYOND_INPUT,
        rounds_weights=rounds,
        own_sampling=frozenset(() if preferred is None else typed(preferred, "preferred_sampling_params", dict)),
        drafts=drafts,
        drafts_exactly=not drafts or all(threshold in (None, 1) for threshold in thresholds),
        loads_deltas=LOADER in (maybe(info, "custom_weight_loader", list) or ()),
    )
