"""Device, communication backend and world of this process."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from mrl.ports import MEETING_VARIABLE, listen, world_problem

_POLL_S, _POLLED_RANKS = 0.01, 64  # polling interval up to that many ranks; longer for more ranks
_EVERYBODY = "every rank"
_had_world = False  # in this process
_fake_device: torch.device | None = None  # see mrl.platform.fake_rank


def device() -> torch.device:
    """Returns the GPU with this process's LOCAL_RANK if there is CUDA, else the CPU.

    A launcher may show each process its own GPU alone, which then is number 0 for any LOCAL_RANK.
    """
    if _fake_device is not None:
        return _fake_device
    if torch.cuda.is_available():
        alone = torch.cuda.device_count() == 1
        return torch.device("cuda", 0 if alone else int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def use_device() -> None:
    """Sets the current device of a thread; the first call in every thread that uses the model's tensors.

    A new thread's current device is GPU 0, and waits for its streams would be for the wrong ones. Does nothing on a
    CPU.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(device())


def backend() -> Literal["gloo", "nccl"]:
    return "nccl" if torch.cuda.is_available() else "gloo"


class WorldError(RuntimeError):
    """The world did not form; raised on every present rank, with the names of the absent ones."""


def init_process_group(timeout_s: float, kind: Literal["gloo", "nccl"] | None = None) -> None:
    """Joins the world that the environment describes as torchrun does; a collective that waits longer than this fails.

    Ranks of `mrl train` meet in a file that no other account can open. Elsewhere rank 0's store listens on MASTER_ADDR
    alone; torchrun's own store, if there is one, listens where torchrun decides. A world of one needs no environment.
    Does nothing if there already is a process group.

    kind: the backend; None: by the device. On a GPU, the rank's device becomes current first.
    Raises WorldError if the environment describes no world, or a rank does not come within `timeout_s`.
    """
    if dist.is_initialized():
        return
    _allow_connections()
    _release_earlier_world()
    gc.freeze()  # full collections, one in each of Megatron's saves, then skip imported objects
    limit, kind = timedelta(seconds=timeout_s), kind or backend()
    if kind == "nccl":
        torch.cuda.set_device(device())
    rank, size = 0, 1
    store: dist.Store = dist.HashStore()
    if "WORLD_SIZE" in os.environ:
        if (problem := world_problem()) is not None:
            raise WorldError(problem)
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ["WORLD_SIZE"])
        store = _meet(rank, size, limit)
    # no `device_id`, with which NCCL would create every group at once: most of a mesh's 25 are never used
    dist.init_process_group(kind, store=store, rank=rank, world_size=size, timeout=limit)


@contextlib.contextmanager
def single_process_world(timeout_s: float) -> Iterator[None]:
    """Runs the block in a world; one made here ends with the block."""
    is_own = not dist.is_initialized()
    init_process_group(timeout_s)
    try:
        yield
    finally:
        if is_own:
            dist.destroy_process_group()


def _release_earlier_world() -> None:
    """Collects the groups and models of an earlier trainer of this process: frozen, they would stay with two threads a
    group."""
    global _had_world
    if _had_world:
        gc.unfreeze()
        gc.collect()
    _had_world = True


def _allow_connections() -> None:
    """Raises the limit of open files, since a gloo group connects to each rank and 1,024 files suffice for a few
    hundred."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _meet(rank: int, size: int, limit: timedelta) -> dist.Store:
    """Returns the world's store once all ranks have reached it."""
    folder, attempt = os.environ.get(MEETING_VARIABLE), _attempt()
    store = _listening_store(rank, limit) if folder is None else dist.FileStore(f"{folder}/{attempt}", size)
    store.set_timeout(limit)
    here, end = dist.PrefixStore(attempt, store), time.monotonic() + limit.total_seconds()
    here.set(f"rank {rank}", "here")
    names = [f"rank {number}" for number in range(size)]
    for name in names if rank == 0 else [_EVERYBODY]:  # rank 0 polls for all ranks, the others for one key
        while not here.check([name]):
            if time.monotonic() > end:
                within = f"within run.timeout_s = {limit.total_seconds():g} s"
                missing = [name for name in names if not here.check([name])]
                raise WorldError(f"not all {size} ranks joined {within}: {', '.join(missing)} did not join")
            time.sleep(_POLL_S * max(1, size / _POLLED_RANKS))
    if rank == 0:
        here.set(_EVERYBODY, "here")
    return store


def _attempt() -> str:
    """Name of this attempt, equal on all ranks and new after a restart.

    A store that rank 0 opens is new each time. Nodes may count differently: ft_launcher counts its own ranks' failures.
    """
    opened = MEETING_VARIABLE not in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return "the only attempt" if opened else f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _listening_store(rank: int, limit: timedelta) -> dist.Store:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    torchrun_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    seconds = f"run.timeout_s = {limit.total_seconds():g} s"
    try:
        if rank == 0 and not torchrun_serves:
            descriptor = listen(host, port).detach()
            return dist.TCPStore(
                host, port, is_master=True, timeout=limit, multi_tenant=True, master_listen_fd=descriptor
            )
        return dist.TCPStore(host, port, timeout=limit)
    except OSError as error:
        text = f"rank 0 cannot listen on MASTER_ADDR {host}, port {port}: {error.strerror or error}"
        raise WorldError(text) from error
    except dist.DistError as error:
        who = "torchrun's store" if torchrun_serves else "rank 0"
        raise WorldError(f"{who} ({host}:{port}) did not respond within {seconds}: {error}") from error


def synchronize() -> None:
    """Blocks until this process's device has finished all work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release_shared_memory() -> None:
    """Frees GPU memory that other processes had mapped and have released."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()


def device_uuid(index: int) -> str:
    """Returns the GPU's UUID, equal in every process whatever devices it sees."""
    return str(torch.cuda.get_device_properties(index).uuid)


def gpu_count() -> int:
    """Returns the number of GPUs that this process may use, 0 on a CPU machine. Starts nothing on them."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def is_built_for_gpus() -> bool:
    """True if this torch could use a GPU; looks for none."""
    return torch.backends.cuda.is_built()


def gpu_names() -> list[str]:
    """Returns the name of each GPU that this process may use, by index."""
    return [torch.cuda.get_device_name(index) for index in range(gpu_count())]
