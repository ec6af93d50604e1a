"""Checks of section `placement`: contradictions, and settings without effect."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.checks.base import without_effect
from mrl.config.derived import Machine
from mrl.config.engines import ENGINES
from mrl.config.problems import Problem
from mrl.config.schema import PlacementConfig, RLConfig

MODE = "placement.mode"
REACHING = ("auto", "http", "distributed")  # transports that can send weights to another node


def check(cfg: RLConfig, machine: Machine) -> Iterator[Problem]:
    """Checks `placement` against the engines and the weight sync."""
    placement, rollout = cfg.placement, cfg.rollout
    if not placement.is_apart:
        others = [name for name in PlacementConfig.model_fields if name not in ("mode", "nodes_per_engine")]
        because = "engines are on the trainer's nodes"
        yield from without_effect(placement, "placement", others, because, MODE)
        yield from _over_nodes(cfg, -(-machine.world_size // machine.local_world_size), "run.nodes")
        return
    if rollout.urls:
        what = "disaggregated uses engines of `mrl serve`, not given addresses: leave one of them out"
        message = f"{what}. Engines at rollout.urls get weights, but cannot join or leave"
        yield Problem((MODE, "rollout.urls"), message)
    because = "disaggregated engines share no GPU with the trainer"
    yield from without_effect(rollout, "rollout", ["release"], because, MODE)
    if cfg.sync.transport not in REACHING:
        message = f"{cfg.sync.transport} does not reach engine nodes: use auto, distributed or http"
        yield Problem(("sync.transport", MODE), message)
    if cfg.run.launcher == "ft":
        limits = cfg.resilience.timeouts_s
        for name, limit in (("setup", limits.setup), ("rollout", limits.rollout), ("sync", limits.sync)):
            if placement.wait_s >= limit:
                message = f"{placement.wait_s:g} s is never reached: ft ends ranks after {limit:g} s of {name}"
                yield Problem(("placement.wait_s", f"resilience.timeouts_s.{name}"), message)
    yield from _over_nodes(cfg, placement.nodes, "placement.nodes")


def _over_nodes(cfg: RLConfig, nodes: int, counted_by: str) -> Iterator[Problem]:
    """Checks engines that span several nodes. `counted_by`: key that sets the number of nodes."""
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
        yield Problem((key, "rollout.tensor"), f"{size} nodes do not divide tensor {rollout.tensor}")
    if nodes % size:
        count = "1 node is" if nodes == 1 else f"{nodes} nodes are"
        yield Problem((key, counted_by), f"{count} not a multiple of {size}")
    if rollout.servers > 1:
        message = f"{rollout.servers} engines per group of {size} nodes, which fit only one engine: set 1"
        yield Problem((key, "rollout.servers"), message)
