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
from mrl.inference.access import Access
from mrl.inference.agent import Agent, Home, Offered
from mrl.inference.launch import Part, started_with
from mrl.inference.start import Others, start_servers
from mrl.parallel import CollectiveErrorCheck, Nodes
from mrl.ports import HERE, address_towards, free_port
from mrl.trainers.shared.run import RunSetup

REACHED_BY_ALL = ("http", "distributed")  # transports by which a sender calls the engines of every node


class NodeError(RuntimeError):
    """A node could not start its engines; raised on every rank, and names it."""


class _NodeAgreement(CollectiveErrorCheck[str]):
    def report(self, error: BaseException) -> str:
        return str(error) or type(error).__name__

    def combined_error(self, what: str, reports: Mapping[int, str]) -> NodeError:
        return NodeError(f"{what}: " + "; ".join(f"rank {rank}: {text}" for rank, text in reports.items()))


@dataclass(frozen=True)
class NodeEngines:
    """nodes: of the world. others: what rank 0 needs to use the other nodes' engines; None where it has all of them.
    homes: the nodes of each engine of the others, by its address. size: nodes that have an engine together."""

    nodes: Nodes
    others: Others | None = None
    homes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    size: int = 1

    def all_homes(self, urls: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
        """The nodes of every engine that the run started: rank 0's has what no other one has. Empty on one node."""
        own = _together(self.nodes, self.nodes.of[0], self.size)
        return {url: self.homes.get(url, own) for url in urls} if self.homes else {}


def start_engines_elsewhere(cfg: RLConfig, setup: RunSetup, machine: Machine) -> NodeEngines:
    """Starts the engines of all nodes but rank 0's, by each one's first rank, and ends them with the setup's stack.
    Collective; returns at once. Raises NodeError."""
    nodes = Nodes.gathered()
    if len(nodes.all) == 1 or cfg.rollout.urls or cfg.placement.is_apart:
        return NodeEngines(nodes)
    size = cfg.placement.nodes_per_engine
    if len(nodes.all) % size:
        what = f"{len(nodes.all)} nodes are no whole number of groups of placement.nodes_per_engine = {size}"
        raise NodeError(f"starting the engines: {what}")
    key = setup.world.from_main("drawing the engines' key", lambda: secrets.token_hex(32))
    part = _meet(nodes, size)
    has_some = nodes.is_first and nodes.mine != nodes.of[0]
    found = _NodeAgreement().each(
        "starting the engines",
        lambda: _start(cfg, setup, Home(nodes.mine, _address()), key, machine, part) if has_some else None,
    )
    offered = [one for one in found if one is not None]
    homes = {url: _together(nodes, one.node, size) for one in offered for url in one.urls}
    is_reached = size > 1 or cfg.sync.transport in REACHED_BY_ALL
    at_home = Home(nodes.of[0], _address() if is_reached else HERE)
    return NodeEngines(nodes, Others(key, at_home, offered, part), homes, size)


def _meet(nodes: Nodes, size: int) -> Part | None:
    """This node's part of an engine over `size` of them, as the first of these says; None where engines are whole.
    Collective."""
    if size == 1:
        return None
    together = _together(nodes, nodes.mine, size)
    has_say = nodes.is_first and nodes.mine == together[0]
    what = "finding where the nodes of an engine meet"
    met = _NodeAgreement().each(what, lambda: _meeting(_address()) if has_say else "")
    return Part(size, together.index(nodes.mine), met[nodes.ranks(together[0])[0]])


def _together(nodes: Nodes, node: int, size: int) -> tuple[int, ...]:
    """The nodes that have an engine with `node`: consecutive ones."""
    place = nodes.all.index(node)
    return nodes.all[place - place % size :][:size]


def _meeting(host: str) -> str:
    return f"{host}:{free_port(host)}"


def _start(cfg: RLConfig, setup: RunSetup, home: Home, key: str, machine: Machine, part: Part | None) -> Offered:
    settings = (started_with(cfg), cfg.model.path, cfg.model.dtype, setup.run_dir / "logs", cfg.run.seed)
    processes = start_servers(*settings, machine, home, Access(key, ours=True), part)
    agent = Agent(home, f"node {home.node} ({socket.gethostname()})", processes, key)
    setup.stack.enter_context(contextlib.closing(agent))
    return agent.offered


def _address() -> str:
    """This node's, as the one where rank 0 is sees it."""
    return address_towards(os.environ.get("MASTER_ADDR", HERE))
