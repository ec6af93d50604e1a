"""From the configuration to running engines."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path

from mrl.config.derived import Machine
from mrl.config.schema import RolloutConfig
from mrl.config.secret_file import read_secret
from mrl.families import engine_arch
from mrl.ports import free_port
from mrl.rollout.access import Access
from mrl.rollout.check import check_server
from mrl.rollout.engine import Engine
from mrl.rollout.fleet import Fleet
from mrl.rollout.launch import CPU, Launch, ServerSpec, launcher
from mrl.rollout.process import EngineProcess
from mrl.rollout.server import Server


def start_engine(
    cfg: RolloutConfig, model_path: str, dtype: str, log_dir: Path, seed: int = 0, *, machine: Machine = CPU
) -> Engine:
    """Start `cfg.servers` servers (or take `cfg.urls`) and return at once; `Engine.wait_ready` waits and checks.

    Servers started here want a key that is drawn now and known to this run alone.

    model_path: Hugging Face directory (without safetensors the engine starts with random weights: push before use)
    dtype: "float32" or "bfloat16"
    log_dir: gets engine_N.log of every server started
    machine: this one, and the trainer's ranks on it; with GPUs the stock engine serves on those of `cfg.gpus`
    seed: of engines that draw without per-sample seeds (rollout.deterministic: false)
    """
    if cfg.urls:
        access = Access(read_secret(cfg.api_key_file) if cfg.api_key_file is not None else None)
        servers = [Server(url.rstrip("/")) for url in cfg.urls]
    else:
        access = Access(secrets.token_hex(32), ours=True)
        servers = []
        for index in range(cfg.servers):
            port = free_port()
            spec = partial(ServerSpec, cfg, model_path, dtype, port, index, seed, machine)
            process = _start(spec, port, f"engine {index}", log_dir / f"engine_{index}.log", access)
            servers.append(Server(process.url, process))
    arch = engine_arch(model_path)
    fleet = Fleet(
        servers,
        access,
        lambda url: check_server(url, access, cfg, model_path, arch.family),
        startup_timeout_s=cfg.startup_timeout_s,
        max_restarts=cfg.max_restarts,
        memory_timeout_s=cfg.request_timeout_s,
    )
    return Engine(
        fleet,
        vocab_size=arch.vocab_size,
        concurrent_requests=cfg.concurrent_requests,
        request_timeout_s=cfg.request_timeout_s,
    )


def _start(spec: partial[ServerSpec], port: int, name: str, log: Path, access: Access) -> EngineProcess:
    """spec: lacks the folder and the key, which are new at every start and never shown."""

    def launch(folder: Path) -> Launch:
        made = spec(folder, access.api_key)
        return launcher(made.cfg.engine)(made)

    return EngineProcess(name, launch, port, log, access)
