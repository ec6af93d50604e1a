"""Times Megatron-Core 0.19's resharding and mrl's exporter on CPUs: plan, and copy from TP2 to whole weights.

    torchrun --nproc-per-node 2 -m tools.bench.resharding MODEL_DIR        # config.json is enough

Megatron copies into a second model (TP1, on both ranks); mrl streams whole tensors under Hugging Face names on rank 0.
Megatron's copy services need CUDA, even gloo's, so this file has one for gloo on CPUs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from mrl import platform

platform.install()

from megatron.core.resharding.copy_services import base  # noqa: E402
from megatron.core.resharding.refit import prepare_swap_model_weights, swap_model_weights  # noqa: E402

from mrl.config.schema import ParallelConfig, TrainConfig  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.models.build import build_model  # noqa: E402
from mrl.parallel import Meshes, rank  # noqa: E402
from mrl.weights.model.export import Exporter  # noqa: E402

REPEATS = 5


class CpuCopies(base.CopyService):
    """Point-to-point copies by gloo, like GlooCopyService without its staging buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.sends: list[base.SendOp] = []
        self.receives: list[base.RecvOp] = []

    def submit_send(self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None) -> None:
        self.sends.append(base.SendOp(task_id=task_id, tensor=src_tensor, dest_rank=dest_rank))

    def submit_recv(self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None) -> None:
        self.receives.append(base.RecvOp(task_id=task_id, tensor=dest_tensor, src_rank=src_rank))

    def run(self) -> None:
        own = [op for op in self.sends if op.dest_rank == self.rank]
        for send, receive in base.match_local_ops_by_task_id(
            own, [op for op in self.receives if op.src_rank == self.rank], "CpuCopies", self.rank
        ):
            receive.tensor.copy_(send.tensor)
        others = [
            dist.P2POp(dist.isend, op.tensor.contiguous(), op.dest_rank)
            for op in self.sends
            if op.dest_rank != self.rank
        ]
        others += [dist.P2POp(dist.irecv, op.tensor, op.src_rank) for op in self.receives if op.src_rank != self.rank]
        for request in dist.batch_isend_irecv(others):
            request.wait()
        self.sends, self.receives = [], []


def seconds(action: Callable[[], object]) -> float:
    dist.barrier()
    started = time.monotonic()
    action()
    dist.barrier()
    return time.monotonic() - started


def main() -> None:
    path = sys.argv[1]
    platform.init_process_group(600)
    arch, meshes = load_arch(path), Meshes(600)
    models, exporters = [], []
    for tensor in (2, 1):
        cfg = ParallelConfig(tensor=tensor)
        mesh = meshes.get(cfg)
        with mesh.active():
            models.append(
                build_model(arch, path, TrainConfig(parallel=cfg), mesh, torch.float32, "policy", seed=tensor)
            )
            exporters.append(Exporter(models[-1], arch, mesh))
    (source, target), copies = models, CpuCopies()
    times = {"megatron: plan": seconds(lambda: prepare_swap_model_weights(source, target))}
    runs = [seconds(lambda: swap_model_weights(source, target, copies)) for _ in range(REPEATS)]
    times["megatron: copy"] = min(runs)
    with meshes.get(ParallelConfig(tensor=2)).active():
        times["mrl: plan"] = seconds(lambda: Exporter(source, arch, meshes.get(ParallelConfig(tensor=2))))
    times["mrl: stream"] = min(seconds(lambda: [None for _ in exporters[0].stream()]) for _ in range(REPEATS))
    whole = dict(exporters[0].stream())
    copied = dict(exporters[1].stream())
    if rank() == 0:
        assert whole.keys() == copied.keys() and all(torch.equal(whole[name], copied[name]) for name in whole)
        size = sum(tensor.nbytes for tensor in whole.values()) / 1e6
        print(f"{path}: {len(whole)} tensors, {size:.0f} MB", *(f"{k} {v:.3f} s" for k, v in times.items()), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
