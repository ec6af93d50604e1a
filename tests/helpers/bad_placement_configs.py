"""Configurations with one mistake in the placement of engines, and the expected error."""

from __future__ import annotations

from tests.helpers.bad_configs import Bad

AT = "    max_new_tokens: 8\n"


def placed(id: str, section: str, key: str, *says: str, rollout: str = "", more: str = "", at: str = "") -> Bad:
    """Returns the valid configuration with more keys of `placement` and `rollout`, and whole sections."""
    return Bad(id, AT, f"{AT}{rollout}placement: {{{section}}}\n{more}", key, says, at)


APART = "mode: disaggregated"
BAD_PLACEMENT = [
    placed("nodes of a colocated run", "nodes: 2", "placement.nodes", "has no effect", "placement.mode"),
    placed(
        "given engines and engine nodes",
        APART,
        "placement.mode",
        "rollout.urls",
        "cannot join or leave",
        rollout="  urls: ['http://a:1']\n",
    ),
    placed(
        "engine nodes that give memory up",
        APART,
        "rollout.release",
        "has no effect",
        rollout="  release: all\n",
        at="  release: all",
    ),
    placed(
        "memory of another machine",
        APART,
        "sync.transport",
        "use auto, distributed or http",
        more="sync: {transport: shared_memory}\n",
    ),
    placed(
        "an engine over nodes that do not cut it",
        f"{APART}, nodes: 3, nodes_per_engine: 3",
        "placement.nodes_per_engine",
        "3 nodes do not divide tensor 4",
        rollout="  tensor: 4\n",
    ),
    placed(
        "an engine over two nodes, and one node",
        "nodes_per_engine: 2",
        "placement.nodes_per_engine",
        "run.nodes",
        "1 node is not a multiple of 2",
        rollout="  tensor: 2\n",
    ),
    placed(
        "given engines over two nodes",
        "nodes_per_engine: 2",
        "placement.nodes_per_engine",
        "rollout.urls",
        "has no effect: mrl starts no engine",
        rollout="  urls: ['http://a:1']\n",
    ),
    placed(
        "half a group of nodes",
        f"{APART}, nodes: 3, nodes_per_engine: 2",
        "placement.nodes_per_engine",
        "3 nodes are not a multiple of 2",
        rollout="  tensor: 2\n",
    ),
    placed(
        "two engines over the same nodes",
        f"{APART}, nodes: 2, nodes_per_engine: 2",
        "placement.nodes_per_engine",
        "which fit only one engine",
        rollout="  tensor: 2\n  servers: 2\n",
    ),
]
