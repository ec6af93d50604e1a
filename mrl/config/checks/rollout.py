"""Checks of generation: lengths, engines, weight sync and validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from mrl.config.checks import lora
from mrl.config.checks.base import check_positions, one_of, without_effect
from mrl.config.derived import Machine
from mrl.config.engines import ENGINES
from mrl.config.fp8_shapes import BLOCK, widths
from mrl.config.placement import gpus_with_engines
from mrl.config.problems import Problem
from mrl.config.schema import ParallelConfig, RLConfig, RolloutConfig, SamplingConfig, ValidationConfig
from mrl.config.secret_file import read_secret
from mrl.families import FAMILIES, ModelArch, hf_keys
from mrl.families.decoder import packing

MOST_CPU_ENGINES = 64
DELTA_TRANSPORTS = ("http", "distributed")
SET_BY_KEYS = {  # SGLang's arguments -> the key that mrl sets each from; the last of two equal arguments would count
    **dict.fromkeys(("--tp", "--tp-size", "--tensor-parallel-size"), "rollout.tensor"),
    **dict.fromkeys(("--nnodes", "--node-rank", "--dist-init-addr"), "placement.nodes_per_engine"),
    **dict.fromkeys(("--model", "--model-path"), "model.path"),
    "--base-gpu-id": "rollout.gpus",
    "--context-length": "rollout.max_context_tokens",
    "--dtype": "model.dtype",
    "--enable-deterministic-inference": "rollout.deterministic",
    "--max-running-requests": "rollout.max_running_requests",
    "--mem-fraction-static": "rollout.memory_fraction",
    "--random-seed": "run.seed",
}
_BLOCK = BLOCK["blockwise"]  # side of a block of fp8 weights


def check(cfg: RLConfig, arch: ModelArch | None, machine: Machine) -> Iterator[Problem]:
    """Yields lengths, engines and transports that do not fit the model, the machine or each other."""
    yield from _lengths(cfg, arch)
    yield from _engine(cfg, arch, machine)
    yield from _offload(cfg, machine)
    yield from _sync(cfg, machine)
    yield from _quantization(cfg, arch, machine)
    yield from lora.check_sync(cfg, arch, machine)
    yield from _validation(cfg)


def check_key_file(key: str, urls: Sequence[str], file: str | None) -> Iterator[Problem]:
    """Checks the key file of engines that run already."""
    if urls and file is not None:
        try:
            read_secret(file)
        except ValueError as error:
            yield Problem((key,), str(error))


def _lengths(cfg: RLConfig, arch: ModelArch | None) -> Iterator[Problem]:
    context = cfg.rollout.max_context_tokens
    yield from check_positions("rollout.max_context_tokens", context, arch)
    limit, key = context, "rollout.max_context_tokens"
    if context is None:
        limit, key = arch.max_positions if arch is not None else None, "model.path"
    prompt, new = cfg.data.max_prompt_tokens, cfg.rollout.sampling.max_new_tokens
    if limit is None:
        return
    if cfg.agent is not None and cfg.agent.max_tokens > limit:
        message = f"{cfg.agent.max_tokens} tokens of a trajectory do not fit into a context of {limit}"
        yield Problem(("agent.max_tokens", key), message)
    elif cfg.agent is None and prompt + new > limit:
        message = f"{prompt} prompt tokens + {new} new tokens do not fit into a context of {limit}"
        yield Problem(("data.max_prompt_tokens", "rollout.sampling.max_new_tokens", key), message)


def _engine(cfg: RLConfig, arch: ModelArch | None, machine: Machine) -> Iterator[Problem]:
    rollout = cfg.rollout
    for warn, stop in (("warn", "stop"), ("warn_sample", "stop_sample")):
        limits = dict(rollout.mismatch)
        if None not in (limits[warn], limits[stop]) and limits[warn] > limits[stop]:
            message = f"{limits[warn]:g} is above {limits[stop]:g}, at which the run stops: lower it"
            yield Problem((f"rollout.mismatch.{warn}", f"rollout.mismatch.{stop}"), message)
    yield from _exact(cfg)
    yield from _top_k("rollout.sampling", rollout.sampling)
    yield from _stops(rollout.sampling, arch)
    if rollout.urls:
        names = ["servers", "tensor", "memory_fraction", "max_context_tokens"]
        names += ["max_running_requests", "max_restarts", "server_args", "gpus", "quantization", "threads"]
        yield from without_effect(rollout, "rollout", names, "mrl starts no engine when urls are given", "rollout.urls")
        yield from check_passwords("rollout.urls", "rollout.api_key_file", rollout.urls)
        if len(set(rollout.urls)) < len(rollout.urls):
            yield Problem(("rollout.urls",), "names an engine twice")
        return
    because = "engines that mrl starts get a key from the run"
    yield from without_effect(rollout, "rollout", ["api_key_file"], because, "rollout.urls")
    for name in (argument.partition("=")[0] for argument in rollout.server_args):
        if name in ("--host", "--port", "--api-key", "--admin-api-key", "--config"):
            message = f"mrl sets {name} itself (engines listen on 127.0.0.1, with a key of the run): leave it out"
            yield Problem(("rollout.server_args",), message)
        elif (key := SET_BY_KEYS.get(name.replace("_", "-"))) is not None:
            yield Problem(("rollout.server_args", key), f"mrl sets {name} from {key}: leave it out, and set that key")
    if rollout.tensor > 1:
        because = "tensor-parallel engines on CPUs use one thread per process"
        yield from without_effect(rollout, "rollout", ["threads"], because, "rollout.tensor")
    ignored = ENGINES[rollout.engine].ignores
    because = f"it belongs to SGLang, and the engine is {rollout.engine}"
    yield from without_effect(rollout, "rollout", ignored, because, "rollout.engine")
    if "tensor" not in ignored and arch is not None and not _fits(rollout.tensor, arch):
        heads = f"{arch.num_heads} heads and {arch.num_kv_heads} key-value heads"
        would = [size for size in range(1, min(arch.num_heads, 64) + 1) if _fits(size, arch)]
        message = f"{rollout.tensor} does not divide the model's {heads}: use {one_of(would)}"
        yield Problem(("rollout.tensor", "model.path"), message)
    if "tensor" not in ignored and arch is not None:
        yield from _served(rollout, arch, machine)
    if arch is not None and packing(hf_keys(cfg.model.path)) is not None:
        message = "its weights are packed, and engines with packed weights cannot be synced: unpack them first with "
        message += "mrl convert hf-to-megatron and then megatron-to-hf"
        yield Problem(("model.path",), message)
    if "server_args" not in ignored and any(argument.startswith("--trust") for argument in rollout.server_args):
        message = "--trust-remote-code runs code from the model directory, which mrl does not allow: leave it out"
        yield Problem(("rollout.server_args",), message)
    yield from check_node(cfg, None if cfg.placement.is_apart else machine.gpus or 0)


def _exact(cfg: RLConfig) -> Iterator[Problem]:
    """Checks for limits that apply only where engines and trainer compute alike, in float32."""
    names = [name for name in ("exact", "exact_sample") if dict(cfg.rollout.mismatch)[name] is not None]
    reasons = {
        "model.dtype": f"the model computes in {cfg.model.dtype}" if cfg.model.dtype != "float32" else None,
        "actor.precision.fp8.recipe": "the actor computes in fp8" if cfg.actor.precision.fp8.recipe != "none" else None,
    }
    for key, because in reasons.items():
        if because is not None:
            both = f"{because}, and this limit is for float32 on both sides"
            yield from without_effect(cfg.rollout.mismatch, "rollout.mismatch", names, both, key)
            return


def check_node(cfg: RLConfig, there: int | None) -> Iterator[Problem]:
    """Checks that a node with `there` GPUs has room for its engines; None: the number of GPUs is unknown."""
    rollout = cfg.rollout
    engines = rollout.servers * rollout.tensor // cfg.placement.nodes_per_engine
    product = f"{rollout.servers} servers x tensor {rollout.tensor}"
    if cfg.placement.nodes_per_engine > 1:
        product += f" / {cfg.placement.nodes_per_engine} nodes"
    if there == 0 and engines > MOST_CPU_ENGINES:
        message = f"{engines} engine processes on one machine without GPUs; the maximum is {MOST_CPU_ENGINES}"
        yield Problem(("rollout.servers", "rollout.tensor"), message)
    if rollout.gpus is not None:
        yield from _gpus(rollout, rollout.gpus, f"{product} = {engines} GPUs", engines, there)
    elif there and engines > there:
        message = f"{product} = {engines} GPUs, but this machine has {there}"
        if rollout.tensor > there * cfg.placement.nodes_per_engine:
            message += ": set placement.nodes_per_engine to spread an engine over several nodes"
        yield Problem(("rollout.servers", "rollout.tensor"), message)


def _gpus(
    rollout: RolloutConfig, gpus: tuple[int, ...], product: str, engines: int, there: int | None
) -> Iterator[Problem]:
    key = "rollout.gpus"
    if len(gpus) != engines:
        named = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
        yield Problem((key, "rollout.servers", "rollout.tensor"), f"names {named}, but {product}")
    twice = sorted({gpu for gpu in gpus if gpus.count(gpu) > 1})
    if twice and "memory_fraction" not in ENGINES[rollout.engine].ignores:
        message = f"names {', '.join(map(str, twice))} twice, and each engine takes memory_fraction of the free memory"
        yield Problem((key,), message)
    if there and (absent := sorted({gpu for gpu in gpus if gpu >= there})):
        numbers = f"{there} GPUs, number 0 to {there - 1}" if there > 1 else "1 GPU, number 0"
        yield Problem((key,), f"{', '.join(map(str, absent))}: this machine has {numbers}")


def _offload(cfg: RLConfig, machine: Machine) -> Iterator[Problem]:
    """Checks that engines do not take the memory that the actor frees.

    This concerns a run that updates no other model, with engines that allocate memory once and keep it.
    """
    others = cfg.critic is not None and not cfg.critic.frozen
    keeps = cfg.rollout.release == "none" and "memory_fraction" not in ENGINES[cfg.rollout.engine].ignores
    if cfg.actor.offload == "none" or others or not keeps:
        return
    if shared := gpus_with_engines(cfg, machine):
        message = (
            f"{cfg.actor.offload}: the engine on GPU {', '.join(map(str, shared))} would take the memory that the "
            "actor frees, and keep it during updates: leave offload out, or set rollout.release: all"
        )
        yield Problem(("actor.offload", "rollout.release"), message)


def _top_k(key: str, sampling: SamplingConfig | ValidationConfig) -> Iterator[Problem]:
    if sampling.top_k != -1 and sampling.top_k < 1:
        yield Problem((f"{key}.top_k",), f"must be -1 (off) or at least 1, got {sampling.top_k}")


def _validation(cfg: RLConfig) -> Iterator[Problem]:
    validation = cfg.validation
    if cfg.data.validation is None:
        if validation != ValidationConfig():
            message = "has no effect: data.validation is not set (validation: null drops an inherited section)"
            yield Problem(("validation", "data.validation"), message)
        return
    yield from _top_k("validation", validation)
    if validation.temperature == 0:
        names = ["top_p", "top_k", *(["samples_per_prompt"] if cfg.agent is None else [])]
        because = "temperature 0 is greedy"
        yield from without_effect(validation, "validation", names, because, "validation.temperature")


def _stops(sampling: SamplingConfig, arch: ModelArch | None) -> Iterator[Problem]:
    key = "rollout.sampling"
    if "" in sampling.stop:
        yield Problem((f"{key}.stop",), "'' would end a response before its first token: remove it")
    outside = [token for token in sampling.stop_token_ids if token < 0 or (arch and token >= arch.vocab_size)]
    if outside:
        vocabulary = f"the model's vocabulary of {arch.vocab_size} tokens" if arch else "every vocabulary"
        keys = (f"{key}.stop_token_ids", "model.path") if arch else (f"{key}.stop_token_ids",)
        yield Problem(keys, f"{', '.join(map(str, outside))}: outside {vocabulary}")


def _served(rollout: RolloutConfig, arch: ModelArch, machine: Machine) -> Iterator[Problem]:
    if machine.gpus == 0 and (why := FAMILIES[arch.family].engine_needs_gpu) is not None:
        message = f"{rollout.engine} {why}: set rollout.engine: transformers"
        yield Problem(("rollout.engine", "model.path"), message)
    quantized = rollout.quantization != "none"
    if (lacks := FAMILIES[arch.family].engine_lacks(arch, rollout.tensor, quantized=quantized)) is not None:
        yield Problem(("rollout.engine", "rollout.tensor", "model.path"), f"{rollout.engine} {lacks}")


def _fits(tensor: int, arch: ModelArch) -> bool:
    """True if the engine can split the heads evenly; it copies key-value heads if they are fewer than ranks."""
    cut, copied = arch.num_kv_heads % tensor == 0, tensor % arch.num_kv_heads == 0
    return arch.num_heads % tensor == 0 and (cut or copied)


def check_passwords(key: str, key_file: str, urls: Sequence[str]) -> Iterator[Problem]:
    """Checks that no address of an engine contains a password."""
    for url in urls:
        parts = urlsplit(url)
        if parts.username is not None or parts.password is not None:
            message = f"the URL of {parts.hostname} contains a password, which logs would show: use api_key_file"
            yield Problem((key, key_file), message)


def _sync(cfg: RLConfig, machine: Machine) -> Iterator[Problem]:
    transport = cfg.sync.transport
    if transport == "cuda_ipc" and machine.gpus == 0:
        yield Problem(("sync.transport",), "cuda_ipc needs GPUs, and this machine has none: use shared_memory or auto")
    hosts = {url: urlsplit(url).hostname or "" for url in cfg.rollout.urls}
    remote = [url for url, host in hosts.items() if host not in ("localhost", "::1") and not host.startswith("127.")]
    if transport in ("cuda_ipc", "shared_memory", "disk") and remote:
        message = f"{transport} cannot reach {', '.join(remote)} on another machine: use distributed, http or auto"
        yield Problem(("sync.transport", "rollout.urls"), message)
    if transport == "disk" and machine.world_size > machine.local_world_size:
        message = "disk uses a directory of one machine, and the run has several nodes: use distributed, http or auto"
        yield Problem(("sync.transport", "run.nodes"), message)
    if transport in ("cuda_ipc", "distributed") and ENGINES[cfg.rollout.engine].is_plain:
        message = f"the {cfg.rollout.engine} engine does not support {transport}: use shared_memory, http, disk or auto"
        yield Problem(("sync.transport", "rollout.engine"), message)
    elif transport == "distributed" and (shared := gpus_with_engines(cfg, machine)):
        message = (
            f"engines and trainer ranks share GPU {', '.join(map(str, shared))}, and an NCCL group cannot have two "
            "members on one GPU: use cuda_ipc, shared_memory, http, disk or auto, or other rollout.gpus"
        )
        yield Problem(("sync.transport", "rollout.urls"), message)
    if transport == "disk":
        because = "disk transport writes files, not buckets"
        yield from without_effect(cfg.sync, "sync", ["bucket_mib"], because, "sync.transport")
    if cfg.sync.delta is None or cfg.sync.lora != "merge":
        return
    key = "sync.delta"
    if transport not in DELTA_TRANSPORTS:
        message = f"{transport} does not send deltas: set transport: http or distributed, or leave delta out"
        yield Problem((key, "sync.transport"), message)
    if cfg.rollout.release == "all":
        message = "all loses the weights that a delta changes: set release: cache, or leave delta out"
        yield Problem((key, "rollout.release"), message)
    if cfg.rollout.quantization != "none":
        message = f"{cfg.rollout.quantization} weights have no deltas: leave delta out"
        yield Problem((key, "rollout.quantization"), message)


def _quantization(cfg: RLConfig, arch: ModelArch | None, machine: Machine) -> Iterator[Problem]:
    rollout, key = cfg.rollout, "rollout.quantization"
    if rollout.quantization == "none" or rollout.urls or ENGINES[rollout.engine].is_plain:
        return
    if machine.gpus == 0:
        yield Problem((key,), "fp8 needs GPUs, and this machine has 0: leave it out")
    if cfg.sync.verify != "off":
        message = "checksum cannot compare fp8 weights of engines with the trainer's: set verify: off"
        yield Problem(("sync.verify", key), message)
    if cfg.run.launcher == "ft":
        yield Problem(("run.launcher", key), "ft verifies engine weights after a restart, which fp8 does not support")
    if cfg.sync.transport == "disk":
        yield Problem(("sync.transport", key), "disk does not support fp8 weights: use another transport")
    if arch is not None and arch.latent is not None:
        message = f"does not support {arch.family}, whose latent projections engines fuse: leave it out"
        yield Problem((key, "model.path"), message)
    for name, (whole, _) in widths(arch, ParallelConfig()).items() if arch is not None else ():
        ranks = 1 if name == "hidden size" else rollout.tensor
        if whole % (_BLOCK * ranks):
            message = f"fp8 needs multiples of {_BLOCK} per engine rank, and {name} {whole} is on {ranks} ranks"
            yield Problem((key, "rollout.tensor"), message)
