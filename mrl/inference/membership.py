"""Membership of engine nodes: a run's `sglang-router` lists the nodes that run `mrl serve`, and checks their health.

A worker of this router is the agent of a node, not an engine: nothing is generated through it, and it never has the
key of an engine. A label of the worker is the node's record. RUN_DIR/engines has two files, readable by their owner:

    key          opens the engines and agents of the run: drawn by whoever comes first, kept as long as the directory
    router.json  address and key of the router, drawn anew by each start of a run and removed at its end
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
from pydantic import TypeAdapter, ValidationError

from mrl.config.schema import RLConfig
from mrl.config.secret_file import read_secret
from mrl.files import make_private, write_privately
from mrl.inference.access import Access, tls
from mrl.inference.agent import Offered
from mrl.inference.client import EngineClient
from mrl.inference.errors import EngineError, EngineStartError, RolloutError
from mrl.inference.launch import Launch, environment
from mrl.inference.process import EngineProcess
from mrl.inference.protocol import ROUTER_WORKERS
from mrl.ports import HERE, default_address, free_port, is_here

FOLDER = "engines"
LABEL = "mrl"
WORKERS = ROUTER_WORKERS.path
ANSWER_S = 5.0
ASKED_AT_ONCE = 64
FAILURES = 2  # health checks in a row after which a node counts as unhealthy
KEY = "MRL_ROUTER_KEY"
# As `python -m sglang_router.launch_router`, without its imports of sglang and torch, which take seconds, and without
# the key among the arguments: all accounts of the machine can read these, and this one alone the environment
START = (
    "import json, os, sys; from sglang_router.router import Router; from sglang_router.router_args import RouterArgs; "
    f"Router.from_args(RouterArgs(**json.loads(sys.argv[1]), api_key=os.environ.pop('{KEY}'))).start()"
)


@dataclass(frozen=True)
class NodeRecord:
    """The record that an engine node registers."""

    engines: Offered
    serves: dict[str, Any]  # settings that the run must have too, by key
    state: Literal["starting", "ready"] = "starting"
    rendezvous: str | None = None  # where the nodes of an engine over several meet; None: each has its own engines


@dataclass(frozen=True)
class ListedNode:
    """A node as the router lists it."""

    id: str  # of its worker
    healthy: bool  # its agent answers the router's checks
    record: NodeRecord


RECORD = TypeAdapter(NodeRecord)


def served(cfg: RLConfig) -> dict[str, Any]:
    """Returns the settings that trainer and `mrl serve` must have alike, by key."""
    rollout, placement = cfg.rollout, cfg.placement
    return {
        "rollout.engine": rollout.engine,
        "rollout.servers": rollout.servers,
        "rollout.tensor": rollout.tensor,
        "rollout.deterministic": rollout.deterministic,
        "placement.nodes_per_engine": placement.nodes_per_engine,
        "model.dtype": cfg.model.dtype,
        "actor.routing_replay": cfg.actor.routing_replay,
    }


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Returns the settings that differ in words; empty if none do."""
    wrong = [key for key, value in ours.items() if theirs.get(key) != value]
    return ", ".join(f"{key} is {theirs.get(key)}, the run has {ours[key]}" for key in wrong)


def engines_folder(run_dir: Path) -> Path:
    """Returns RUN_DIR/engines; creates it, with the run directory, if need be."""
    make_private(run_dir)
    make_private(run_dir / FOLDER)
    return run_dir / FOLDER


def engines_key(run_dir: Path) -> str:
    """Returns the key of the run's engines. Raises ValueError for a file that others can read."""
    file = engines_folder(run_dir) / "key"
    if not file.exists():
        mine = file.with_name(f".key.{secrets.token_hex(8)}")
        write_privately(mine, secrets.token_hex(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(mine, file)  # whole, and for one of several alone
        mine.unlink()
    return read_secret(str(file))


def router_file(run_dir: Path) -> Path:
    """Returns the file with the router's address and key."""
    return engines_folder(run_dir) / "router.json"


class RouterClient:
    """Client of the router whose address and key are in `file`; raises OSError if the file is missing. Every method
    raises RolloutError if the router does not answer."""

    def __init__(self, file: Path) -> None:
        place = json.loads(file.read_text())
        self.url, self._access = place["url"], Access(place["key"], ours=True)
        self._http = httpx.Client(
            base_url=self.url, headers=self._access.headers, timeout=ANSWER_S, trust_env=False, verify=tls()
        )

    def close(self) -> None:
        self._http.close()

    def nodes(self) -> list[ListedNode]:
        """Returns all registered nodes, including those that have disappeared without leaving."""
        answer, found = self._ask("GET", WORKERS), list[ListedNode]()
        try:
            for worker in answer["workers"]:
                with contextlib.suppress(ValidationError):  # no `mrl serve` of this version
                    record = RECORD.validate_json(worker["metadata"].get(LABEL, ""))
                    found.append(ListedNode(worker["id"], worker["is_healthy"], record))
        except (KeyError, TypeError, AttributeError) as error:
            raise RolloutError(f"{self.url} is no sglang-router: it answers {answer!r:.200}") from error
        return found

    def register(self, record: NodeRecord, listed: ListedNode | None) -> None:
        """Adds a node, or replaces the record of a listed one. The router applies the change a moment later."""
        labels = {LABEL: RECORD.dump_json(record).decode()}
        if listed is None:
            self._ask("POST", WORKERS, {"url": record.engines.agent, "labels": labels})
        else:
            self._ask("PUT", f"{WORKERS}/{listed.id}", {"labels": labels})

    def remove(self, node: ListedNode) -> None:
        """Removes a node; the router applies the change a moment later. A running node registers again."""
        self._ask("DELETE", f"{WORKERS}/{node.id}")

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        try:
            self._access.check(self.url, path)
            return self._http.request(method, path, json=body).raise_for_status().json()
        except (httpx.HTTPError, EngineError, ValueError, RuntimeError) as error:
            text = f"the run's router {self.url} does not answer: {type(error).__name__}: {error}"
            raise RolloutError(text) from error


class RouterProcess(EngineProcess):
    """The router of a run, which ends with this process.

    address: of this machine, which engine nodes reach; None: that of the default route
    silence_s: seconds without an answer after which a node counts as unhealthy
    Raises EngineStartError for an address that is not this machine's.
    """

    def __init__(self, run_dir: Path, address: str | None, silence_s: float) -> None:
        if address is not None and not is_here(address):
            raise EngineStartError(f"placement.address: {address} is not an address of the trainer's first node")
        host = default_address() if address is None else socket.gethostbyname(address)
        port, key, metrics_port = free_port(host), secrets.token_hex(32), free_port(HERE)
        check_s = max(1, int(silence_s / (FAILURES + 1)))
        settings = {"host": host, "port": port, "prometheus_host": HERE, "prometheus_port": metrics_port}
        settings |= {"health_check_interval_secs": check_s, "health_check_timeout_secs": check_s}
        settings |= {"health_failure_threshold": FAILURES, "health_success_threshold": 1}
        settings |= {"policy": "round_robin", "log_level": "warn", "worker_startup_timeout_secs": 30}
        # A proxy set for the internet must not see the checks of nodes
        env = {name: value for name, value in environment().items() if not name.lower().endswith("_proxy")}
        launch = Launch([sys.executable, "-c", START, json.dumps(settings)], env | {KEY: key})
        log = run_dir / "logs" / "router.log"
        self.file = router_file(run_dir)
        write_privately(self.file, json.dumps({"url": f"http://{host}:{port}", "key": key}) + "\n")
        self.client = RouterClient(self.file)
        super().__init__("sglang-router", lambda folder: launch, port, log, Access(key, ours=True), host)

    def _answers(self) -> bool:
        with contextlib.suppress(RolloutError):
            self.client.nodes()
            return True
        return False


def engines_at(urls: Sequence[str], access: Access) -> dict[str, str]:
    """Returns the engines at these addresses, and behind those that are routers, in order: {engine: entry of `urls`}.
    An address that does not answer yet counts as an engine.

    Raises EngineStartError for a router without engines or with invalid addresses, and for an engine that is listed
    twice.
    """
    urls = [url.rstrip("/") for url in urls]
    found: dict[str, str] = {}
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        for url, engines in zip(urls, pool.map(lambda url: _at(url, access), urls)):
            for engine in engines:
                if engine in found:
                    where = " and ".join(dict.fromkeys((found[engine], url)))
                    raise EngineStartError(f"rollout.urls: {engine}: there twice, by itself or behind routers: {where}")
                found[engine] = url
    return found


def _at(url: str, access: Access) -> list[str]:
    with contextlib.closing(EngineClient(url, ANSWER_S, access)) as client:
        behind = client.workers()
    if behind is None:
        return [url]
    if not behind:
        raise EngineStartError(f"{url} is a router without engines: start them first, or name them in rollout.urls")
    for engine in behind:
        parts = urlsplit(engine)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in engine:
            raise EngineStartError(
                f"the router {url} names {engine!r}, which is not an address such as http://host:30000"
            )
    return [engine.rstrip("/") for engine in behind]
