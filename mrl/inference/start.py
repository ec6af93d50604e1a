"""Starts the engines of a configuration."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mrl.config.derived import Machine
from mrl.config.schema import RLConfig, RolloutConfig
from mrl.config.secret_file import read_secret
from mrl.families import ModelArch, engine_arch
from mrl.inference.access import Access
from mrl.inference.agent import Home, Member, Offered, OtherNode, joined
from mrl.inference.check import check_server, wait_until_reachable
from mrl.inference.engine import Engine
from mrl.inference.engine_pool import EnginePool
from mrl.inference.errors import EngineError, EngineStartError
from mrl.inference.launch import CPU, Launch, Part, ServerSpec, launcher
from mrl.inference.membership import RouterProcess, engines_at, engines_key, served
from mrl.inference.open_engine_pool import OpenEnginePool
from mrl.inference.process import EnginePart, EngineProcess
from mrl.inference.routed import RoutedShape
from mrl.inference.server import Server
from mrl.inference.server_info import ServerInfo
from mrl.ports import free_port


@dataclass(frozen=True)
class Others:
    """Nodes other than rank 0's; their engines have been started there."""

    key: str  # of all engines of the run
    home: Home  # rank 0's node
    offered: Sequence[Offered] = ()  # in the order of the nodes
    part: Part | None = None  # of rank 0's node, if engines extend over several nodes


def start_engine(
    cfg: RolloutConfig,
    model_path: str,
    dtype: str,
    log_dir: Path,
    seed: int = 0,
    *,
    machine: Machine = CPU,
    others: Others | None = None,
) -> Engine:
    """Starts `cfg.servers` servers, or uses those at `cfg.urls` and behind routers there. Returns at once;
    `Engine.wait_ready` waits and checks.

    Servers started here need a key that is generated for this run.

    model_path: Hugging Face directory (without safetensors the engine starts with random weights: sync before use)
    dtype: "float32" or "bfloat16"
    log_dir: gets engine_N.log of every server started
    machine: this machine and the trainer's ranks on it; with GPUs, SGLang runs on those of `cfg.gpus`
    seed: for engines without per-sample seeds (rollout.deterministic: false)
    others: engines of the other nodes, in a run over several nodes
    """
    nodes, named_by = list[OtherNode](), dict[str, str]()
    if cfg.urls:
        access = Access(read_secret(cfg.api_key_file) if cfg.api_key_file is not None else None)
        named_by = engines_at(cfg.urls, access)
        servers = [Server(url) for url in named_by]
    else:
        others = others or Others(secrets.token_hex(32), Home())
        access, part = Access(others.key, ours=True), others.part
        processes = start_servers(cfg, model_path, dtype, log_dir, seed, machine, others.home, access, part)
        nodes = [OtherNode(offered, access) for offered in others.offered]
        parts: list[Member] = [*processes, *(engine for node in nodes for engine in node.engines)]
        servers = [Server(one.url, one) for one in joined(parts, part.nodes if part is not None else 1)]
    arch = engine_arch(model_path)

    def check(url: str) -> tuple[ServerInfo, list[str]]:
        with _naming_router(url, named_by):
            return check_server(url, access, cfg, model_path, arch.family, dtype, outlives=bool(cfg.urls))

    def wait_for(url: str) -> None:
        with _naming_router(url, named_by):
            wait_until_reachable(url, access, cfg)

    pool = EnginePool(
        servers,
        access,
        check,
        startup_timeout_s=cfg.startup_timeout_s,
        max_restarts=cfg.max_restarts,
        nodes=nodes,
        memory_timeout_s=cfg.request_timeout_s,
        wait_for=wait_for if cfg.urls else None,
    )
    return _engine(pool, arch, cfg)


@contextlib.contextmanager
def _naming_router(url: str, named_by: Mapping[str, str]) -> Iterator[None]:
    """Adds the router of rollout.urls that named the engine, if one did, to errors."""
    try:
        yield
    except (EngineError, EngineStartError) as error:
        if named_by.get(url, url) == url:
            raise
        raise EngineStartError(f"{error} (behind the router {named_by[url]} of rollout.urls)") from error


def join_engines(cfg: RLConfig, run_dir: Path) -> Engine:
    """Returns the engines of the nodes that run `mrl serve` for the run in `run_dir`, at once; `Engine.wait_ready`
    waits for as many nodes as the run needs, and checks them. Raises ValueError for a key that others can read,
    EngineStartError if the router with which the nodes register cannot be started."""
    rollout, model, arch = cfg.rollout, cfg.model, engine_arch(cfg.model.path)
    access = Access(engines_key(run_dir), ours=True)
    pool = OpenEnginePool(
        RouterProcess(run_dir, cfg.placement.address, cfg.placement.silence_s),
        cfg.placement,
        served(cfg),
        access,
        lambda url: check_server(url, access, rollout, model.path, arch.family, model.dtype, outlives=True),
        startup_timeout_s=rollout.startup_timeout_s,
        max_restarts=rollout.max_restarts,
        memory_timeout_s=rollout.request_timeout_s,
    )
    return _engine(pool, arch, rollout)


def _engine(pool: EnginePool, arch: ModelArch, cfg: RolloutConfig) -> Engine:
    return Engine(
        pool,
        vocab_size=arch.vocab_size,
        concurrent_requests=cfg.concurrent_requests,
        request_timeout_s=cfg.request_timeout_s,
        routed=RoutedShape.of(arch) if arch.experts is not None else None,
    )


def start_servers(
    cfg: RolloutConfig,
    model_path: str,
    dtype: str,
    log_dir: Path,
    seed: int,
    machine: Machine,
    home: Home,
    access: Access,
    part: Part | None = None,
) -> list[EngineProcess]:
    """Starts all servers of a node. If one cannot be started, the others are ended.

    part: of the engine that the node shares with others; other parameters as of `start_engine`
    """
    before, ports = home.node * cfg.servers, list[int]()
    kind = EnginePart if part is not None and part.number else EngineProcess

    def launch(index: int, folder: Path) -> Launch:
        parts_before = part.number if part is not None else 0  # parts of an engine have one seed
        own = (cfg, model_path, dtype, ports[index], index, seed + before - parts_before, machine, folder)
        spec = ServerSpec(*own, access.api_key, home.host, part)
        found = launcher(cfg.engine)(spec)
        return found if spec.gpu else replace(found, kind=cfg.engine)

    with contextlib.ExitStack() as undo:
        started = list[EngineProcess]()
        for index in range(cfg.servers):
            ports.append(free_port(home.host, ports))
            name, log = f"engine {before + index}", log_dir / f"engine_{before + index}.log"
            process = kind(name, partial(launch, index), ports[index], log, access, home.host)
            started.append(undo.enter_context(contextlib.closing(process)))
        undo.pop_all()
        return started
