"""Settings that a server reports, and their consequences for a run that syncs weights to it and trains on its samples.
Written against sglang 0.5.23."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mrl.inference.answers import from_json, maybe, typed
from mrl.inference.delta import LOADER

BEYOND_INPUT = 4  # tokens of prompt and response that SGLang has room for, beyond its max_req_input_len


@dataclass(frozen=True)
class ServerInfo:
    """An engine's settings, as it reports them.

    device: "cpu" where it says nothing
    checksum: how it hashes its weights: "sha256" of their bytes, or by "tiles", as SGLang does on a GPU
    dtype: what it computes in, such as "float32"; "": it does not say, or rounds weights or its cache to something else
    is_deterministic: the same seed gives the same tokens, whatever else is in the batch
    has_tokenizer: it can look for stop strings
    releases_memory: it gives memory up when it is told to; None: it does not know what that is
    returns_experts: it says which experts tokens went to, when it is asked
    has_prefix_cache: it says that it keeps keys and values of a prompt for the requests that follow
    tensor: tensor-parallel ranks, each of which needs its own part of a weight sync; None: it does not say
    stages, copies: of the model, pipeline stages and data-parallel replicas
    room: tokens of prompt and response together, at most; None: it does not say
    rounds_weights: what its weights are rounded to beyond dtype, such as "fp8"; "": nothing
    own_sampling: parameters for which it has values of its own, where a request leaves them out
    drafts: how it guesses tokens ahead, such as "EAGLE"; "": it does not
    drafts_exactly: it draws what it would draw without guessing
    loads_deltas: it has mrl's loader for changes of weights
    """

    device: str
    is_deterministic: bool
    has_tokenizer: bool
    checksum: Literal["sha256", "tiles"] = "sha256"
    releases_memory: bool | None = None
    returns_experts: bool = False
    has_prefix_cache: bool = False
    dtype: str = ""
    tensor: int | None = None
    stages: int = 1
    copies: int = 1
    room: int | None = None
    rounds_weights: str = ""
    own_sampling: frozenset[str] = frozenset()
    drafts: str = ""
    drafts_exactly: bool = True
    loads_deltas: bool = False

    def hindrances(self, tensor: int | None, quantization: str, asked: Collection[str]) -> Iterator[str]:
        """Why a run must not use it, what to do.

        tensor: what it must be, if that is known; quantization: the form of synced weights, "none" or "fp8";
        asked: parameters of sampling that every request names
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


def read_server_info(answer: Any) -> ServerInfo:
    info = typed(answer, "the answer", dict)
    rounds = maybe(info, "quantization", str) or maybe(info, "torchao_config", str) or ""
    is_plain = not rounds and maybe(info, "kv_cache_dtype", str) in (None, "auto")
    longest = maybe(info, "max_req_input_len", int)
    thresholds = [info.get(f"speculative_accept_threshold_{kind}") for kind in ("single", "acc")]
    drafts = maybe(info, "speculative_algorithm", str) or ""
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
        own_sampling=frozenset(_preferred(info.get("preferred_sampling_params"))),
        drafts=drafts,
        drafts_exactly=not drafts or all(threshold in (None, 1) for threshold in thresholds),
        loads_deltas=LOADER in (maybe(info, "custom_weight_loader", list) or ()),
    )


def _preferred(given: Any) -> dict[str, Any]:
    """Older servers report it as the text of their command line."""
    found = from_json(given.encode()) if isinstance(given, str) else given
    return {} if found is None else typed(found, "preferred_sampling_params", dict)
