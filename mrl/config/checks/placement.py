"""Engines on nodes of their own: what contradicts that, and what would have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.checks.base import changed, without_effect
from mrl.config.derived import Machine
from mrl.config.engines import ENGINES
from mrl.config.problems import Problem
from mrl.config.schema import PlacementConfig, RLConfig

MODE = "placement.mode"
REACHING = ("auto", "http", "distributed")  # transports that bring weights to another node


def check(cfg: RLConfig, machine: Machine) -> Iterator[Problem]:
    """Of the section `placement`, against the engines and how they get their weights."""
    placement, rollout = cfg.placement, cfg.rollout
    if not placement.is_apart:
        others = [name for name in PlacementConfig.model_fields if name not in ("mode", "nodes_per_engine")]
        because = "engines are on the trainer's nodes, which are all that the run waits for"
        yield from without_effect(placement, "placement", others, because, MODE)
        yield from _over_nodes(cfg, -(-machine.world_size // machine.local_world_size), "run.nodes")
        return
    if rollout.urls:
        message = (
            "engines at given addresses and engines that `mrl serve` starts: leave out one of them. What is behind "
            "rollout.urls gets weights, but neither comes later nor goes"
        )
        yield Problem((MODE, "rollout.urls"), message)
    for name in changed(rollout, "release"):
        message = "has no effect: no engine is on a GPU of the trainer, and `mrl serve`'s are needed all the time"
        yield Problem((f"rollout.{name}", MODE), message)
    if cfg.sync.transport not in REACHING:
        message = f"{cfg.sync.transport} does not reach engine nodes: use auto, distributed or http"
        yield Problem(("sync.transport", MODE), message)
    if cfg.run.launcher == "ft":
        limits = cfg.resilience.timeouts_s
        for name, limit in (("setup", limits.setup), ("rollout", limits.rollout), ("sync", limits.sync)):
            if placement.wait_s >= limit:
                message = f"{placement.wait_s:g} s are never waited: ft ends ranks after {limit:g} s of {name}"
                yield Problem(("placement.wait_s", f"resilience.timeouts_s.{name}"), message)
    yield from _over_nodes(cfg, placement.nodes, "placement.nodes")


def _over_nodes(cfg: RLConfig, nodes: int, counted_by: str) -> Iterator[Problem]:
    """Engines that one of these nodes has no room for. counted_by: the key that says how many nodes."""
    rollout, key = cfg.rollout, "placement.nodes_per_engine"
    size = cfg.placement.nodes_per_engine
    if size == 1:
        return
    if rollout.urls:
        yield Problem((key, "rollout.urls"), "has no effect: mrl starts no engine when urls are given")
        return
    if "tensor" in ENGINES[rollout.engine].ignores:
        yield Problem((key, "rollout.engine"), f"{size}: the {rollout.engine} engine runs on one device; set it to 1")
        return
    if rollout.tensor % size:
        message = f"tensor {rollout.tensor} cannot be cut evenly over {size} nodes"
        yield Problem((key, "rollout.tensor"), message)
    if nodes % size:
        count = "1 node is" if nodes == 1 else f"{nodes} nodes are"
        yield Problem((key, counted_by), f"{count} no whole number of groups of {size}")
    if rollout.servers > 1:
        message = f"{rollout.servers} engines on each group of {size} nodes: one over several nodes has them alone"
        yield Problem((key, "rollout.servers"), message)
