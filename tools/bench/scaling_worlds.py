"""Parts of `tools/bench/scaling.py` with several ranks: processes connected by gloo, or a rank of a simulated world."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mrl.ports import free_port
from tools.bench.scaling_parts import Clock, Row, peak_mib, random_rollout

TIMEOUT_S = 300.0


def in_ranks(count: int, work: Callable[[int], Row]) -> list[Row]:
    """Runs `work` in `count` forks of this process; returns their rows by rank."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(count):
            if child := os.fork():
                children.append(child)
                continue
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["BENCH_PORT"]}
                (Path(folder) / str(rank)).write_text(json.dumps(work(rank)))
                os._exit(0)
            except BaseException:
                traceback.print_exc(file=sys.stderr)
                os._exit(1)
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(count)]


def combined(rows: list[Row]) -> Row:
    """Returns rank 0's seconds, the largest bytes and memory of any rank, and the processor seconds of all ranks."""
    most = {name: max(row[name] for row in rows) for name in rows[0] if name.endswith(("_mib", "_bytes"))}
    return rows[0] | most | {"all_ranks_cpu_s": sum(row["cpu_s"] for row in rows)}


def used_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def world(ranks: int, tokens: int) -> Row:
    """Broadcasts rank 0's samples to every rank by `World.from_main`."""
    from mrl import platform

    platform.install()
    import torch.distributed as dist

    from mrl.trainers.shared.world import World

    os.environ["BENCH_PORT"] = str(free_port())

    def work(rank: int) -> Row:
        world_of_ranks = World(TIMEOUT_S, TIMEOUT_S, 1)
        rollout = random_rollout(8, tokens // 8) if rank == 0 else None
        sent, broadcast = [0], dist.broadcast

        def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            sent[0] += tensor.numel() * tensor.element_size()
            return broadcast(tensor, *args, **kwargs)

        dist.broadcast = counted
        dist.distributed_c10d.broadcast = counted
        world_of_ranks.any(False)
        clock, base = Clock(), peak_mib()
        with clock.of("from_main"):
            received = world_of_ranks.from_main("rollout", lambda: rollout)
        assert received is not None and received.num_response_tokens > tokens // 2
        row = clock.row | {"memory_mib": peak_mib() - base, "sent_mib": sent[0] / 2**20, "cpu_s": used_s()}
        world_of_ranks.close()
        return row

    return combined(in_ranks(ranks, work))


def start(ranks: int) -> Row:
    """Forms the world and the groups of TP8 x PP2 (TP2 below 16 ranks), broadcasts nothing, gathers from all ranks."""
    from mrl import platform

    platform.install()
    from mrl.config.schema import ParallelConfig
    from mrl.parallel.error_check import gather
    from mrl.trainers.shared.world import World

    os.environ["BENCH_PORT"] = str(free_port())

    def work(rank: int) -> Row:
        clock = Clock()
        with clock.of("world"):
            world_of_ranks = World(TIMEOUT_S, TIMEOUT_S, 1)
        world_of_ranks.any(False)
        with clock.of("layout"):
            world_of_ranks.meshes.get(ParallelConfig(tensor=8 if ranks >= 16 else 2, pipeline=2))
        world_of_ranks.any(False)
        with clock.of("sign_of_life"):
            world_of_ranks.from_main("nothing", lambda: None)
        world_of_ranks.any(False)
        with clock.of("results"):
            gather("x" * 200)
        row = clock.row | {"memory_mib": peak_mib(), "cpu_s": used_s(), "open_files": len(os.listdir("/proc/self/fd"))}
        world_of_ranks.any(False)
        world_of_ranks.close()
        return row

    return combined(in_ranks(ranks, work))


def layout(ranks: int) -> Row:
    """Creates the process groups of TP8 x PP2 in one rank of a simulated world; counts them."""
    from mrl import platform

    platform.install()
    import torch.distributed as dist

    from mrl.config.schema import ParallelConfig
    from mrl.parallel import Mesh
    from mrl.platform.fake_rank import fake_rank

    clock, counted = Clock(), SimpleNamespace(calls=0)
    with fake_rank(0, ranks):
        inner = dist.new_group

        def counting(*args: Any, **kwargs: Any) -> Any:
            counted.calls += 1
            return inner(*args, **kwargs)

        dist.new_group = counting
        with clock.of("layout"):
            Mesh(ParallelConfig(tensor=8, pipeline=2))
    return clock.row | {"groups": counted.calls}


def checkpoint(ranks: int, shards: int = 400) -> Row:
    """Rank 0: reads the save plans of all ranks, each with `shards` shards of TP8 tensors; makes the global plan."""
    import pickle

    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    from mrl import platform

    platform.install()
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

    def item(rank: int, number: int) -> WriteItem:
        offset, size = torch.Size([rank % 8, 0]), torch.Size([1, 4096])
        data = TensorWriteData(ChunkStorageMetadata(offset, size), TensorProperties(), torch.Size([8, 4096]))
        name = f"optimizer.state.exp_avg_sq.decoder.layers.{rank // 8}.{number}.weight"
        return WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data)

    clock, bytes_a_rank = Clock(), 0
    planner, sent = MCoreSavePlanner(flatten_state_dict=False, can_run_decentralized_global_plan=False), []
    for rank in range(ranks):
        sent.append(pickle.dumps(SavePlan([item(rank, number) for number in range(shards)])))
        bytes_a_rank = max(bytes_a_rank, len(sent[-1]))
    base = peak_mib()
    with clock.of("unpickle"):
        plans = [pickle.loads(each) for each in sent]
    planner.set_up_planner({}, is_coordinator=True)
    with clock.of("plan"):
        planner.create_global_plan(plans)
    return clock.row | {"bytes_a_rank": bytes_a_rank, "memory_mib": peak_mib() - base}


PARTS: dict[str, Callable[..., Row]] = {"world": world, "start": start, "layout": layout, "checkpoint": checkpoint}
