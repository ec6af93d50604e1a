"""Buckets in GPU memory that the engine maps by CUDA IPC: no copy through the host. Same machine, CUDA only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from mrl import platform
from mrl.weights.errors import WeightError
from mrl.weights.sync.payload import Bucket, pickle_flat
from mrl.weights.sync.transports.base import Engines, HandleTransport, SenderLocation

_DEVICE_ARGUMENT = 6  # of reductions.rebuild_cuda_tensor


class CudaIpc(HandleTransport):
    """One buffer a bucket on the sender's own GPU. Every engine process must see that GPU (CUDA_VISIBLE_DEVICES).

    Buffers are never reused: the engine's first rank replies while the others may still read. torch keeps a shared
    block until every reader has released it.
    """

    name = "cuda_ipc"
    load_format = "flattened_bucket"

    def __init__(self, engines: Engines, location: SenderLocation) -> None:
        if location.device.type != "cuda":
            raise WeightError(
                f"sync.transport cuda_ipc needs the model on a CUDA device, and it is on {location.device.type}: "
                "use auto, shared_memory or http"
            )
        super().__init__(engines, location)

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Does nothing: a buffer is allocated for each bucket."""

    def buffer(self, bucket: Bucket) -> Tensor:
        return torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.location.device)

    def handles(self, bucket: Bucket, flat: Tensor) -> list[str]:
        """Exports once a reader: each releases its own reference."""
        platform.synchronize()
        return [pickle_flat(bucket, _exported(flat)) for _ in range(self.engines.tensor)]

    def release(self, failed: bool) -> None:
        platform.release_shared_memory()


def _exported(flat: Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the call that maps `flat` in another process. The GPU is named by UUID: its index differs between
    processes.
    """
    _, arguments = reductions.reduce_tensor(flat)
    uuid = platform.device_uuid(arguments[_DEVICE_ARGUMENT])
    return reductions.rebuild_cuda_tensor, (
        *arguments[:_DEVICE_ARGUMENT],
        uuid,
        *arguments[_DEVICE_ARGUMENT + 1 :],
    )
