"""How fast do this world's ranks add up a buffer? `mrl preflight CONFIG --network`, as every rank: by nccl where there
are GPUs, by gloo elsewhere."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mrl import platform

TIMEOUT_S = 120.0
WARM_UPS, REPEATS = 2, 5
MIB = 1 << 20


@dataclass(frozen=True)
class Network:
    """GB/s are those of the bus, as nccl-tests count: 2 (n - 1) / n x bytes / seconds, which does not depend on n."""

    backend: str
    ranks: int
    nodes: int
    mib: int
    gb_per_s: float


class WrongSum(RuntimeError):
    """An all-reduce gave something else than the sum."""


def measure(mib: int) -> Network:
    """Of the world that the environment describes; collective. The median of a few all-reduces.

    Raises WorldError if a rank does not come, WrongSum if what comes out is wrong.
    """
    platform.init_process_group(TIMEOUT_S)
    ranks, nbytes = dist.get_world_size(), mib * MIB
    buffer = torch.empty(nbytes // 4, dtype=torch.float32, device=platform.device())
    seconds = []
    for _ in range(WARM_UPS + REPEATS):
        buffer.fill_(1.0)
        platform.synchronize()
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(buffer)
        platform.synchronize()
        seconds.append(time.perf_counter() - began)
        least, most = float(buffer.min()), float(buffer.max())
        if least != ranks or most != ranks:
            raise WrongSum(f"an all-reduce of ones over {ranks} ranks gave {least:g} to {most:g}")
    nodes: list[str] = [""] * ranks
    dist.all_gather_object(nodes, os.environ.get("GROUP_RANK", socket.gethostname()))
    median = sorted(seconds[WARM_UPS:])[REPEATS // 2]
    bus = 2 * (ranks - 1) / ranks * nbytes / median / 1e9
    return Network(platform.backend(), ranks, len(set(nodes)), mib, bus)


def main(mib: int, at_least: float | None, *, as_json: bool) -> int:
    """Prints a line on rank 0. Exit code 1: no world, a wrong sum, or less than `at_least` GB/s."""
    if "RANK" not in os.environ:
        print("mrl: --network is run as every rank: torchrun --nproc-per-node 8 -m mrl preflight ...", file=sys.stderr)
        return 1
    try:
        found = measure(mib)
    except (platform.WorldError, WrongSum, RuntimeError) as error:
        print(f"mrl: network, rank {os.environ['RANK']} on {socket.gethostname()}: {error}", file=sys.stderr)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    is_slow = at_least is not None and found.ranks > 1 and found.gb_per_s < at_least
    if os.environ["RANK"] == "0":
        where = f"{found.ranks} ranks on {found.nodes} node{'s' * (found.nodes > 1)}"
        said = f"network: all-reduce of {mib} MiB over {where} by {found.backend}: {found.gb_per_s:.2f} GB/s"
        said += f", less than the {at_least:g} that are asked for" if is_slow else ""
        print(json.dumps(vars(found)) if as_json else said, flush=True)
    return int(is_slow)
