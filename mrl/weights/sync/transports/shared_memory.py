"""Buckets in /dev/shm: the engine maps them by name and copies straight into its parameters. Same machine only."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor

from mrl.rollout.client import EngineClient
from mrl.weights.errors import WeightError
from mrl.weights.sync.payload import Bucket, SharedBuffer
from mrl.weights.sync.transports.base import MIB, Transport, largest

SHM = "/dev/shm"


class SharedMemory(Transport):
    """One buffer a sender, as large as its largest bucket, reused by all of them and freed after each push."""

    name = "shared_memory"
    one_machine = True
    _buffer: SharedBuffer | None = None

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        size = largest(buckets)
        state = os.statvfs(SHM)
        free = state.f_bavail * state.f_frsize
        if free < size:
            raise WeightError(
                f"{SHM} has {free // MIB} MiB free, this rank's largest bucket needs {-(-size // MIB)} MiB: "
                f"enlarge {SHM}, lower sync.bucket_mib, or set sync.transport to http or distributed"
            )
        self._buffer = SharedBuffer(size)

    def buffer(self, bucket: Bucket) -> Tensor:
        assert self._buffer is not None
        return self._buffer.flat

    def send(self, bucket: Bucket, flat: Tensor) -> None:
        assert self._buffer is not None
        shared = self._buffer

        def update(client: EngineClient) -> None:
            payload = shared.pickle(bucket, readers=self.engines.tensor)
            client.update_weights_from_tensor([payload] * self.engines.tensor)

        self.engines.call(update)

    def release(self, failed: bool) -> None:
        self._buffer = None
