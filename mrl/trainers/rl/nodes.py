"""The engines of a run over several nodes: every node's first rank has those of its node, and tells rank 0 of them."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from mrl.config.derived import Machine
from mrl.config.schema import RLConfig
from mrl.parallel import Agreement, Nodes
from mrl.ports import HERE, address_towards
from mrl.rollout import Home, Offered, Others, start_agent
from mrl.trainers.shared.run import Start

REACHED_BY_ALL = ("http", "distributed")  # transports by which a sender calls the engines of every node


class NodeError(RuntimeError):
    """A node could not start its engines; raised on every rank, and names it."""


class _NodeAgreement(Agreement[str]):
    def report(self, error: BaseException) -> str:
        return str(error) or type(error).__name__

    def verdict(self, what: str, reports: Mapping[int, str]) -> NodeError:
        return NodeError(f"{what}: " + "; ".join(f"rank {rank}: {text}" for rank, text in reports.items()))


@dataclass(frozen=True)
class NodeEngines:
    """nodes: of the world. others: what rank 0 needs to use the other nodes' engines; None where it has all of them.
    homes: the node of each engine of the others, by its address."""

    nodes: Nodes
    others: Others | None = None
    homes: Mapping[str, int] = field(default_factory=dict)

    def all_homes(self, urls: tuple[str, ...]) -> dict[str, int]:
        """The node of every engine that the run started: rank 0's has what no other one has. Empty on one node."""
        first = self.nodes.of[0]
        return {url: self.homes.get(url, first) for url in urls} if self.homes else {}


def start_engines_elsewhere(cfg: RLConfig, setup: Start, machine: Machine) -> NodeEngines:
    """Starts the engines of all nodes but rank 0's, by each one's first rank, and ends them with the setup's stack.
    Collective; returns at once. Raises NodeError."""
    nodes = Nodes.gathered()
    if len(nodes.all) == 1 or cfg.rollout.urls or cfg.placement.is_apart:
        return NodeEngines(nodes)
    key = setup.world.from_main("drawing the engines' key", lambda: secrets.token_hex(32))
    has_some = nodes.is_first and nodes.mine != nodes.of[0]
    found = _NodeAgreement().each(
        "starting the engines",
        lambda: _start(cfg, setup, Home(nodes.mine, _address()), key, machine) if has_some else None,
    )
    offered = [one for one in found if one is not None]
    homes = {url: one.node for one in offered for url in one.urls}
    at_home = Home(nodes.of[0], _address() if cfg.sync.transport in REACHED_BY_ALL else HERE)
    return NodeEngines(nodes, Others(key, at_home, offered), homes)


def _start(cfg: RLConfig, setup: Start, home: Home, key: str, machine: Machine) -> Offered:
    where = f"node {home.node} ({socket.gethostname()})"
    logs, model = setup.run_dir / "logs", cfg.model
    agent = start_agent(
        cfg.rollout, model.path, model.dtype, logs, cfg.run.seed, machine=machine, home=home, where=where, key=key
    )
    setup.stack.enter_context(contextlib.closing(agent))
    return agent.offered


def _address() -> str:
    """This node's, as the one where rank 0 is sees it."""
    return address_towards(os.environ.get("MASTER_ADDR", HERE))
