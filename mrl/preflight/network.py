"""Measures the all-reduce of this world's ranks and finds slow nodes.

`mrl preflight CONFIG --network` runs it as every rank, by nccl on GPUs and by gloo elsewhere.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from mrl import platform

TIMEOUT_S = 120.0
WARM_UPS, REPEATS = 2, 5
MIB = 1 << 20
NAME_VARIABLE = "MRL_NODE_NAME"  # name of this rank's node in messages
SLOW_SHARE = 0.5  # of the nodes' median


@dataclass(frozen=True)
class NetworkBandwidth:
    """Bus bandwidth in GB/s, as nccl-tests count it: 2 (n - 1) / n x bytes / seconds, which does not depend on n.

    gb_per_s: all-reduce over all ranks. pairs: all-reduces between two neighbouring nodes, as (node, node, GB/s of the
    slowest pair of ranks, local rank of that pair)
    """

    backend: str
    ranks: int
    nodes: int
    mib: int
    gb_per_s: float
    pairs: tuple[tuple[str, str, float, int], ...]


class WrongSum(RuntimeError):
    """An all-reduce returned something other than the sum."""


def default_mib() -> int:
    return 256 if platform.backend() == "nccl" else 16


def measure(mib: int) -> NetworkBandwidth:
    """Measures the world of the environment as the median of a few all-reduces. Collective.

    Raises WorldError if a rank does not come, WrongSum if a result is wrong.
    """
    platform.init_process_group(TIMEOUT_S)
    ranks = dist.get_world_size()
    buffer = torch.empty(mib * MIB // 4, dtype=torch.float32, device=platform.device())
    speed = _all_reduce(buffer, dist.group.WORLD, ranks)
    names: list[str] = [""] * ranks
    dist.all_gather_object(names, _name())
    by_node: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        by_node.setdefault(name, []).append(rank)
    return NetworkBandwidth(platform.backend(), ranks, len(by_node), mib, speed, tuple(_pairs(buffer, by_node)))


def _name() -> str:
    """Name of the node, with the launcher's node number, since one machine may hold several nodes."""
    number = os.environ.get("GROUP_RANK")
    host = socket.gethostname()
    return os.environ.get(NAME_VARIABLE) or (host if number is None else f"node {number} ({host})")


def _all_reduce(buffer: torch.Tensor, group: dist.ProcessGroup | None, ranks: int) -> float:
    """Bus bandwidth in GB/s."""
    seconds = []
    for _ in range(WARM_UPS + REPEATS):
        buffer.fill_(1.0)
        platform.synchronize()
        dist.barrier(group)
        began = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        platform.synchronize()
        seconds.append(time.perf_counter() - began)
        least, most = float(buffer.min()), float(buffer.max())
        if least != ranks or most != ranks:
            raise WrongSum(f"an all-reduce of ones over {ranks} ranks gave {least:g} to {most:g}")
    return 2 * (ranks - 1) / ranks * buffer.nbytes / median(seconds[WARM_UPS:]) / 1e9


def _pairs(buffer: torch.Tensor, by_node: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, str, float, int]]:
    """Measures each node with the next one, rank by rank. Collective. In a round no node has two neighbours at once."""
    nodes, rank = list(by_node), dist.get_rank()
    mine: dict[tuple[str, str], tuple[float, int]] = {}
    for edges in rounds(len(nodes)):
        own: list[tuple[tuple[str, str], int, dist.ProcessGroup]] = []
        for edge in ((nodes[one], nodes[other]) for one, other in edges):
            for place, members in enumerate(zip(by_node[edge[0]], by_node[edge[1]], strict=False)):
                group = dist.new_group(list(members))  # blocks for all ranks: all groups before any pair
                if rank in members:
                    own.append((edge, place, group))
        for edge, place, group in own:  # one, or none
            mine[edge] = (_all_reduce(buffer, group, 2), place)
        dist.barrier()
    found: list[dict[tuple[str, str], tuple[float, int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    for one, other in dict.fromkeys(edge for each in found for edge in each):
        speed, place = min(each[one, other] for each in found if (one, other) in each)
        yield one, other, speed, place


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Returns the edges of a ring of nodes, in rounds in which every node has at most one edge."""
    if nodes < 3:
        return [[(0, 1)]] if nodes == 2 else []
    edges = [(node, (node + 1) % nodes) for node in range(nodes)]
    last = [[edges.pop()]] if nodes % 2 else []
    return [edges[::2], edges[1::2], *last]


def slow_nodes(found: NetworkBandwidth, at_least: float | None) -> list[str]:
    """Returns one sentence for each slow node.

    A node is slow if it is slow with each of its neighbours: against the median of all nodes, if there are more than
    two, and against `at_least` GB/s.
    """
    best: dict[str, tuple[float, int]] = {}
    for one, other, speed, place in found.pairs:
        for name in (one, other):
            best[name] = max(best.get(name, (0.0, 0)), (speed, place))
    usual = median(speed for speed, _ in best.values()) if len(best) > 2 else 0.0
    limit = max(SLOW_SHARE * usual, at_least or 0.0)
    than = f"half of the nodes' median of {usual:.2f}" if limit > (at_least or 0.0) else f"the required {limit:g}"
    what = "GPU" if found.backend == "nccl" else "rank"
    return [
        f"{name} is slow: an all-reduce with its neighbours reaches {speed:.2f} GB/s at best ({what} {place} of the "
        f"node), less than {than}"
        for name, (speed, place) in best.items()
        if speed < limit
    ]


def words(found: NetworkBandwidth) -> str:
    """Describes the result in one sentence."""
    where = f"{found.ranks} ranks on {found.nodes} node{'s' * (found.nodes > 1)}"
    said = f"all-reduce of {found.mib} MiB over {where} by {found.backend}: {found.gb_per_s:.2f} GB/s"
    speeds = [speed for _, _, speed, _ in found.pairs]
    return f"{said}; between pairs of nodes {min(speeds):.2f} to {max(speeds):.2f} GB/s" if speeds else said


def main(mib: int | None, at_least: float | None, *, as_json: bool) -> int:
    """Prints a line on rank 0, more if something is wrong.

    Returns exit code 1 without a world, after a wrong sum, with a slow node, or with less than `at_least` GB/s.
    """
    if "RANK" not in os.environ:
        print(
            "mrl: --network must run on every rank: torchrun --nproc-per-node 8 -m mrl preflight ...", file=sys.stderr
        )
        return 1
    if (found := _measured(mib or default_mib())) is None:
        return 1
    wrong = slow_nodes(found, at_least)
    if at_least is not None and found.nodes == 1 < found.ranks and found.gb_per_s < at_least:
        wrong.append(f"less than the required {at_least:g} GB/s (--at-least)")
    if os.environ["RANK"] == "0":
        lines = [json.dumps(vars(found))] if as_json else [f"network: {line}" for line in (words(found), *wrong)]
        print("\n".join(lines), flush=True)
    return int(bool(wrong))


def _measured(mib: int) -> NetworkBandwidth | None:
    """Measures the network; None after an error, which it prints."""
    try:
        return measure(mib)
    except (platform.WorldError, WrongSum, RuntimeError) as error:
        print(f"mrl: network, rank {os.environ['RANK']} on {_name()}: {error}", file=sys.stderr)
        return None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":  # a rank of `mrl preflight --nodes`, which evaluates the result
    if (seen := _measured(int(sys.argv[1]))) is None:
        sys.exit(1)
    Path(sys.argv[2]).write_text(json.dumps(vars(seen)))  # a file, since NCCL writes to stdout
