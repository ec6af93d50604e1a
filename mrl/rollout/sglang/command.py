"""The command line and environment of one SGLang server (written against sglang 0.5.23)."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from mrl.config.schema import RolloutConfig
from mrl.families import engine_arch
from mrl.ports import LOOPBACK
from mrl.rollout.process import Launch

SHIM = Path(__file__).parents[1] / "cpu_shim"
CPU_RUNNING_REQUESTS = 512
CPU_KV_CACHE_BYTES = 4 << 30  # reserved, touched only as it fills
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class EngineUnavailable(RuntimeError):
    """This machine cannot run the engine that the configuration asks for; the message says what to do."""


def sglang_launch(
    cfg: RolloutConfig,
    model_path: str,
    dtype: str,
    port: int,
    index: int,
    seed: int,
    *,
    gpu: bool,
    folder: Path,
    api_key: str | None = None,
) -> Launch:
    """Server `index` of `cfg.servers`. With `gpu` a stock server on its own GPUs, else the CPU form.

    folder: this account's alone; gets the file that tells the server its key (a command line could be read by anybody)
    and the one over which its processes meet, instead of a port
    """
    if importlib.util.find_spec("sglang") is None:
        raise EngineUnavailable(
            "rollout.engine = sglang, but the package sglang is not installed: install mrl[sglang], "
            "give rollout.urls of running servers, or set rollout.engine: transformers"
        )
    arguments = _common(cfg, model_path, dtype, port, (seed + index) % 2**32)  # what numpy takes
    arguments += _gpu(cfg, index) if gpu else _cpu(cfg, model_path, dtype)
    env = _gpu_env() if gpu else _cpu_env(cfg.tensor)
    env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder}/rendezvous"
    env["GLOO_SOCKET_IFNAME"] = LOOPBACK["GLOO_SOCKET_IFNAME"]  # all its processes are on this machine
    env["SGLANG_DIAG_BYPASS_HEALTH_GENERATE"] = "1"  # /health asks for no key, and would sample a token among the run's
    if api_key is not None:
        file = folder / "key.yaml"
        file.touch(0o600)
        file.write_text(f'api-key: "{api_key}"\n')
        arguments += ["--config", str(file)]
    return Launch([sys.executable, "-m", "sglang.launch_server", *arguments, *cfg.server_args], env)


def _common(cfg: RolloutConfig, model_path: str, dtype: str, port: int, seed: int) -> list[str]:
    arguments = ["--model-path", model_path, "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--dtype", dtype, "--tp-size", str(cfg.tensor), "--random-seed", str(seed)]
    arguments += ["--skip-server-warmup", "--log-level", "warning"]
    if not cfg.sampling.stop:  # token ids travel; only stop strings need the engine to know text
        arguments.append("--skip-tokenizer-init")
    if cfg.deterministic:
        arguments.append("--enable-deterministic-inference")
    if cfg.max_context_tokens is not None:
        arguments += ["--context-length", str(cfg.max_context_tokens)]
    if not has_safetensors(model_path):  # training from scratch: the first weight push fills the engine
        arguments += ["--load-format", "dummy"]
    return arguments


def _gpu(cfg: RolloutConfig, index: int) -> list[str]:
    arguments = ["--mem-fraction-static", str(cfg.memory_fraction), "--base-gpu-id", str(index * cfg.tensor)]
    if cfg.max_running_requests is not None:
        arguments += ["--max-running-requests", str(cfg.max_running_requests)]
    return arguments


def _cpu(cfg: RolloutConfig, model_path: str, dtype: str) -> list[str]:
    running = cfg.max_running_requests or min(CPU_RUNNING_REQUESTS, cfg.concurrent_requests)
    arguments = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    arguments += ["--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle"]  # idle, it would take a core
    arguments += ["--max-running-requests", str(running)]
    arguments += ["--max-total-tokens", str(_cpu_cache_tokens(cfg, model_path, dtype, running))]
    return arguments


def _cpu_cache_tokens(cfg: RolloutConfig, model_path: str, dtype: str, running: int) -> int:
    """KV cache slots: a full context for every running request, as far as CPU_KV_CACHE_BYTES goes."""
    arch = engine_arch(model_path)
    bytes_a_token = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * DTYPE_BYTES[dtype]
    context = cfg.max_context_tokens or arch.max_positions
    return int(max(context, min(running * context, CPU_KV_CACHE_BYTES // bytes_a_token)))


def _cpu_env(tensor: int) -> dict[str, str]:
    present = [name for name in ("triton", "sgl_kernel") if importlib.util.find_spec(name) is not None]
    if present:
        raise EngineUnavailable(
            f"no GPU is visible, and {' and '.join(present)} is installed: mrl's CPU form of the SGLang server works "
            "only in an environment without them. Set up the CPU environment of the README, give rollout.urls of "
            "running servers, or set rollout.engine: transformers"
        )
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(SHIM), *filter(None, [env.get("PYTHONPATH")])])
    env["SGLANG_USE_CPU_ENGINE"] = "1"
    env["OMP_NUM_THREADS"] = "1"  # more threads are slower on small models, and harmful on shared cores
    env["TORCHDYNAMO_DISABLE"] = "1"
    if tensor > 1:
        cores = os.cpu_count() or 1
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % cores) for rank in range(tensor))
    return _without_crash_dumps(without_launcher(env))


def _gpu_env() -> dict[str, str]:
    return _without_crash_dumps(without_launcher(dict(os.environ)))


def _without_crash_dumps(env: dict[str, str]) -> dict[str, str]:
    """A server that lost a process would otherwise stay up, silent, for a minute to write dumps."""
    off = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
    return off | env


def without_launcher(env: dict[str, str]) -> dict[str, str]:
    """The engine makes a process group of its own: torchrun's variables must not reach it."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR")
    torchrun = ("MASTER_PORT", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_NAME")
    return {k: v for k, v in env.items() if k not in ours + torchrun and not k.startswith("TORCHELASTIC_")}


def has_safetensors(model_path: str) -> bool:
    return any(Path(model_path).glob("*.safetensors"))
