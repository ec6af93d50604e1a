"""Checks of this machine, run on every node."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import torch
from huggingface_hub import constants, get_token

from mrl import platform, ports
from mrl.config.derived import Machine, asks_for_transformer_engine
from mrl.config.schema import AnyConfig, Config
from mrl.config.trainers.table import trainer_of
from mrl.inference.errors import EngineUnavailable
from mrl.inference.launch import Part, ServerSpec, launcher
from mrl.launcher.elastic import missing
from mrl.observe import trackers
from mrl.packages import pip_install, pip_install_extra
from mrl.preflight.finding import Finding, Verdict
from mrl.preflight.versions import TESTED

CONNECT_S = 5.0
SLOWER = 0.9  # speed of bfloat16 relative to float32 below which a warning is due
DEFAULT_PORTS = {"https": 443, "http": 80}


def check_temporary_files() -> Iterator[Finding]:
    """Checks TMPDIR, which engines, torch and the sandbox write to."""
    wanted = os.environ.get("TMPDIR") or tempfile.gettempdir()
    if os.path.isdir(wanted) and os.access(wanted, os.W_OK | os.X_OK):
        yield Finding("temporary files", "ok", wanted)
        return
    text = f"TMPDIR is {wanted!r}, in which no files can be created"
    yield Finding("temporary files", "problem", text, "set TMPDIR to a writable directory")


def check_switches() -> Iterator[Finding]:
    """Checks the environment variables of the platform."""
    try:
        platform.check_switches()
    except ValueError as error:
        yield Finding("switches", "problem", str(error), "set it to one of these, or unset it")


def check_layers(cfg: AnyConfig) -> Iterator[Finding]:
    """Checks transformer-engine if the configuration asks for it by name."""
    asked = asks_for_transformer_engine(cfg)
    if asked and (problem := platform.transformer_engine_problem()) is not None:
        text = f"{', '.join(asked)}: transformer_engine cannot be used here: {problem}"
        yield Finding("layers", "problem", text, "set it to auto or local, or see mrl doctor")


def check_dtype(cfg: AnyConfig) -> Iterator[Finding]:
    """Warns if this CPU multiplies bfloat16 slower than float32, as CPUs without bfloat16 instructions do."""
    if platform.gpu_count() or not isinstance(cfg, Config) or cfg.model.dtype != "bfloat16":
        return
    fast, slow = platform.cpu_gflops(torch.float32), platform.cpu_gflops(torch.bfloat16)
    if slow < SLOWER * fast:
        text = (
            f"model.dtype is bfloat16: this CPU reaches {slow:.0f} GFLOP/s in bfloat16 and {fast:.0f} in float32, and "
            "log-probs of engine and trainer differ more in bfloat16"
        )
        yield Finding("dtype", "warning", text, "set model.dtype: float32, which is faster and more exact here")


def check_fp8(cfg: AnyConfig) -> Iterator[Finding]:
    """Checks fp8 if it is configured and not emulated."""
    wanted = {name: model.train.precision.fp8 for name, model in cfg.built().items()}
    for recipe in {fp8.recipe for fp8 in wanted.values() if fp8.is_real}:
        models = ", ".join(name for name, fp8 in wanted.items() if fp8.recipe == recipe and fp8.is_real)
        if (problem := platform.fp8_problem(recipe)) is not None:
            text = f"{models}: precision.fp8.recipe {recipe} cannot be computed here: {problem}"
            yield Finding("fp8", "problem", text, "see mrl doctor, or set precision.fp8.emulate: true")
        else:
            yield Finding("fp8", "ok", f"{models}: {recipe}, by transformer-engine")


def check_quantization(cfg: AnyConfig) -> Iterator[Finding]:
    """Warns about engines with a lower precision than the trainer's without rollout correction."""
    (rollout, _), algorithm = cfg.engines() or (None, None), cfg.algorithm_used()
    if rollout is None or algorithm is None or rollout.quantization == "none":
        return
    if algorithm.rollout_correction.rollout_is is None and not algorithm.rollout_correction.rollout_rs:
        what = "rollout.quantization: fp8 makes the engine's log-probs differ from the trainer's"
        remedy = "set algorithm.rollout_correction.rollout_is: token to correct for it"
        yield Finding("engines", "warning", f"{what}, and algorithm.rollout_correction is off", remedy)


def check_packages(cfg: AnyConfig) -> Iterator[Finding]:
    """Checks the optional packages of the configured launcher, trackers and engine."""
    found = [*filter(None, [missing(cfg.run.launcher)]), *trackers.missing(cfg.run)]
    for name in trainer_of(cfg).packages:
        if find_spec(name) is None:
            what = f"trainer: {cfg.trainer} needs {name}, which is not installed"
            found.append(f"{what}: {pip_install_extra('diffusion')}")
    if cfg.engine_nodes() is not None and find_spec("sglang_router") is None:
        command = pip_install(f"sglang-router=={TESTED['sglang-router']}")
        found.append(f"placement.mode: disaggregated needs sglang-router, which lists the engine nodes: {command}")
    rollout, _ = cfg.engines() or (None, None)
    if isinstance(cfg, Config) and rollout is not None and not rollout.urls and cfg.engine_nodes() is None:
        here = Machine.for_launch(cfg, platform.gpu_count())
        size = cfg.nodes_per_engine()
        part = Part(size, 0, f"{ports.HERE}:1") if size > 1 else None
        spec = ServerSpec(rollout, cfg.model.path, cfg.model.dtype, 0, 0, 0, here, Path(), part=part)
        try:
            launcher(rollout.engine)(spec)
        except EngineUnavailable as error:
            found.append(str(error))
    yield from (Finding("packages", "problem", problem) for problem in found)
    if not found:
        yield Finding("packages", "ok", "all packages of launcher, trackers and engine are installed")


def check_ports() -> Iterator[Finding]:
    """Checks ports and addresses at which ranks and engines meet."""
    try:
        port = ports.free_port()
    except ports.NoFreePort as error:
        yield Finding("ports", "problem", str(error), "stop the programs that listen there")
        return
    yield from _interfaces()
    yield from _meeting_place()
    where = f"between {ports.PORTS.start} and {ports.PORTS.stop}"
    yield Finding("ports", "ok", f"127.0.0.1 has free ports {where}, such as {port}")


def _interfaces() -> Iterator[Finding]:
    """Checks GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.

    Gloo takes whole names. NCCL takes prefixes, with or without a port, of which one must exist; after `=` it takes
    whole names, and after `^` names to leave out.
    """
    names = [name for _, name in socket.if_nameindex()]
    gloo, nccl = (os.environ.get(f"{library}_SOCKET_IFNAME", "") for library in ("GLOO", "NCCL"))
    asked = [name for name in gloo.split(",") if name]
    wrong = [name for name in asked if name not in names]
    if wrong:
        text = f"GLOO_SOCKET_IFNAME={gloo}: this machine has no interface {', '.join(wrong)}, only {', '.join(names)}"
        remedy = "give full names of these, without the = and ^ that NCCL_SOCKET_IFNAME accepts, or unset it"
        yield Finding("ports", "problem", text, remedy)
    is_exact = nccl.startswith("=")
    wanted = [name.partition(":")[0] for name in nccl.removeprefix("=").split(",") if name]
    has = any(name == want or (name.startswith(want) and not is_exact) for want in wanted for name in names)
    if wanted and not nccl.startswith("^") and not has:
        text = f"NCCL_SOCKET_IFNAME={nccl}: this machine has no such interface, only {', '.join(names)}"
        yield Finding("ports", "problem", text, "set it to one of these, or unset it")


def _meeting_place() -> Iterator[Finding]:
    """Checks MASTER_ADDR of ranks that another launcher starts; `mrl train` gives its own ranks another address."""
    host = os.environ.get("MASTER_ADDR")
    if host is None:
        return
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a host name"
        text = f"MASTER_ADDR={host} cannot be resolved on this machine ({why})"
        is_used = ports.is_a_rank() and ports.MEETING_VARIABLE not in os.environ
        verdict: Verdict = "problem" if is_used else "warning"
        yield Finding("ports", verdict, text, "set it to the first node's address, or unset it")


def check_services(cfg: AnyConfig) -> Iterator[Finding]:
    """Checks that external engines and reward servers accept a connection, and that a token of the hub is set."""
    rollout, _ = cfg.engines() or (None, None)
    for url in rollout.urls if rollout is not None else ():
        if (problem := _unreachable(url)) is not None:
            text = f"rollout.urls: {problem}"
            limit = rollout.startup_timeout_s if rollout is not None else 0.0
            yield Finding("services", "warning", text, f"start it; the run waits up to {limit:g} s for it")
    for key, url in cfg.teacher_urls().items():
        if (problem := _unreachable(url)) is not None:
            yield Finding("services", "problem", f"{key}: {problem}", "start the engine of the teacher, or correct it")
    if (nodes := cfg.engine_nodes()) is not None:
        text = f"the run waits up to {nodes.wait_s:g} s for {nodes.nodes} engine nodes (mrl serve)"
        yield Finding("services", "ok", text)
    for key, server in cfg.reward_servers().items():
        if (problem := _unreachable(server.url)) is not None:
            yield Finding("services", "problem", f"{key}.url: {problem}", "start the server, or correct the URL")
    if cfg.checkpoint.push_to_hub is not None:
        yield from _hub(cfg.checkpoint.push_to_hub)


def _hub(repository: str) -> Iterator[Finding]:
    """Checks for what makes the upload at the end fail."""
    text = f"checkpoint.push_to_hub: {repository}"
    if constants.HF_HUB_OFFLINE:
        yield Finding("services", "problem", f"{text}: HF_HUB_OFFLINE is set, which forbids uploads", "unset it")
    elif get_token() is None:
        remedy = "set HF_TOKEN to a token that may write, or run: hf auth login"
        yield Finding("services", "problem", f"{text}: there is no token of the Hugging Face hub", remedy)
    elif (problem := _unreachable(constants.ENDPOINT)) is not None:
        remedy = "the upload at the end fails unless it answers then; the export stays in RUN_DIR/hf"
        yield Finding("services", "warning", f"{text}: {problem}", remedy)


def _unreachable(url: str) -> str | None:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or DEFAULT_PORTS.get(parts.scheme, 80)
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        return f"nothing answers at {host} port {port} ({error.strerror or error})"
    return None


def check_gpus() -> Iterator[Finding]:
    """Checks that each GPU computes and that its memory is free."""
    try:
        found = platform.gpu_health()
    except (platform.GpuTimeout, OSError) as error:
        yield Finding("GPUs", "problem", str(error), "check nvidia-smi and the kernel log (dmesg, Xid)")
        return
    for gpu in found:
        if gpu.problem:
            text = f"GPU {gpu.index} ({gpu.name}): {gpu.problem}"
            remedy = "find its processes with nvidia-smi, or exclude it with CUDA_VISIBLE_DEVICES"
            yield Finding("GPUs", "problem", text, remedy)
    if not found:
        yield Finding("GPUs", "skipped", "none on this machine: ranks compute on the CPU and communicate over gloo")
    elif not any(gpu.problem for gpu in found):
        kinds = ", ".join(dict.fromkeys(gpu.name for gpu in found))
        yield Finding("GPUs", "ok", f"{len(found)} x {kinds}: all compute correctly and have free memory")
