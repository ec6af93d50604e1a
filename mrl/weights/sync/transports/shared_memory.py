"""Transport by /dev/shm: the engine maps buckets by name and copies them directly into its parameters. Same machine
only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle

from torch import Tensor

from mrl.weights.errors import WeightError
from mrl.weights.sync.payload import Bucket, SharedBuffer
from mrl.weights.sync.transports.base import MIB, HandleTransport, largest_bucket_bytes

SHM = "/dev/shm"


class SharedMemory(HandleTransport):
    """Two buffers a sender, each as large as its largest bucket, used alternately and freed after each sync."""

    name = "shared_memory"
    _turns: Iterator[Tensor] = iter(())
    _shared: Mapping[int, SharedBuffer] = {}  # by the address of their bytes

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        size, turns = largest_bucket_bytes(buckets), len(buckets[:2])
        state = os.statvfs(SHM)
        free = state.f_bavail * state.f_frsize
        if free < turns * size:
            raise WeightError(
                f"{SHM} has {free // MIB} MiB free, and this rank's buckets need {turns} x {-(-size // MIB)} MiB: "
                f"enlarge {SHM}, lower sync.bucket_mib, or set sync.transport to http or distributed"
            )
        made = [SharedBuffer(size) for _ in range(turns)]
        self._shared = {one.flat.data_ptr(): one for one in made}
        self._turns = cycle([one.flat for one in made])

    def buffer(self, bucket: Bucket) -> Tensor:
        return next(self._turns)

    def handles(self, bucket: Bucket, flat: Tensor) -> list[str]:
        readers = self.engines.tensor
        return [self._shared[flat.data_ptr()].pickle(bucket, readers)] * readers

    def release(self, failed: bool) -> None:
        self._turns, self._shared = iter(()), {}
