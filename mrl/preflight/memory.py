"""Checks that the run fits into GPU and host memory, counted as `mrl plan` does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import psutil

from mrl import platform
from mrl.config.derived import Machine
from mrl.config.schema import Config
from mrl.directories import size_text
from mrl.plan import chips
from mrl.plan.chips import GIB, Assumptions, Chip, Cluster
from mrl.plan.plan import Plan, make_plan, read_shapes
from mrl.preflight.finding import Finding


def check_memory(cfg: Config, machine: Machine, kind: str | None = None) -> Iterator[Finding]:
    """Checks the memory of the world `machine`. kind: GPU as in `mrl plan --gpu`; None: this machine's GPU."""
    try:
        chip = chips.KINDS[kind] if kind is not None else _chip_here()
    except (platform.GpuTimeout, OSError):
        yield Finding("GPU memory", "skipped", "not checked: the GPUs do not respond")
        return
    cluster = Cluster(chip, machine.world_size, machine.local_world_size)
    fused = kind is not None or platform.transformer_engine_usable()
    plan = make_plan(cfg, cluster, read_shapes(cfg), Assumptions(), fused=fused)
    yield from _of_gpus(plan)
    yield _of_the_host(plan, is_node=kind is None)


def _chip_here() -> Chip:
    """Smallest of this machine's GPUs, with the lowest capability; measured by another process, since this one holds no
    GPU memory."""
    found = platform.gpu_health()
    if not found:
        return chips.NO_GPU
    smallest = min(found, key=lambda gpu: gpu.total)
    capability = min(gpu.capability for gpu in found)  # only these values are known
    return replace(chips.CHIPS[chips.DEFAULT], name=smallest.name, memory=smallest.total, capability=capability)


def _of_gpus(plan: Plan) -> Iterator[Finding]:
    if not plan.on_gpu:
        why = "not checked: this machine has no GPU; name one with --gpu, such as --gpu h100-80g"
        yield Finding("GPU memory", "skipped", why)
        return
    for shortage in plan.shortages:
        if shortage.counted:
            yield Finding("GPU memory", "problem", shortage.text, shortage.remedy)
        else:
            text = f"{shortage.text}; it fits without the memory assumed for CUDA, NCCL and fragmentation"
            yield Finding("GPU memory", "warning", text, shortage.remedy)
    if not plan.shortages:
        name, (rank, phase) = max(plan.worst.items(), key=lambda item: item[1][1].total)
        chip = plan.cluster.chip
        needs = f"{phase.total / GIB:.1f} of the {chip.memory / GIB:.1f} GiB of a {chip.name}"
        yield Finding("GPU memory", "ok", f"peak in phase {name}, on rank {rank}: {needs}")


def _of_the_host(plan: Plan, is_node: bool) -> Finding:
    """Checks host memory. is_node: this machine is one of the run's"""
    memory, needed = psutil.virtual_memory(), plan.host_of_node
    ranks = min(plan.cluster.per_node, plan.cluster.gpus)
    what = "offloaded models, checkpoint writes and samples" if plan.on_gpu else "models, engines and samples"
    text = f"{what} of the {ranks} rank{'s' * (ranks > 1)} of a node need {size_text(int(needed))}"
    if not is_node:
        return Finding("host memory", "skipped", f"not checked: --gpu plans for other machines than this one; {text}")
    has = f"{size_text(memory.total)}, {size_text(memory.available)} free"
    text += f" in addition to the programs themselves; this machine has {has}"
    remedy = "use fewer ranks per node, offload: none where it fits, or checkpoint.asynchronous: false"
    if not plan.on_gpu:
        remedy = "use a smaller model, fewer ranks, or a smaller max_tokens_per_microbatch"
    if needed > memory.total:
        return Finding("host memory", "problem", text, remedy)
    if needed > memory.available:
        return Finding("host memory", "warning", text, f"stop the programs that use it, or {remedy}")
    return Finding("host memory", "ok", text)
