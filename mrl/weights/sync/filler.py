"""Filling of buckets from the export stream."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from mrl import platform
from mrl.weights.errors import WeightError
from mrl.weights.sync.checksum import StreamHasher
from mrl.weights.sync.payload import Bucket
from mrl.weights.sync.transports import Transport
from mrl.weights.sync.transports.background import InBackground

LATE_S = 5.0  # extra wait for a delivery that does not end at the sync's deadline


class BucketFiller:
    """Copies the stream's tensors into buckets; a thread delivers each full bucket while the next one is filled."""

    def __init__(self, transport: Transport, buckets: Sequence[Bucket], hasher: StreamHasher | None) -> None:
        self._transport, self._hasher = transport, hasher
        self._todo = [(bucket, slot) for bucket in buckets for slot in bucket.slots]
        self._next = 0
        self._flat: Tensor | None = None
        self._delivery: InBackground | None = None
        self.waiting_s = 0.0  # for deliveries

    def add(self, name: str, tensor: Tensor) -> None:
        """Copies the stream's next tensor, of any shape, into its slot; sends the bucket when it is full.

        Raises WeightError if the plan has another tensor next, and the error of an earlier bucket's delivery.
        """
        if self._next == len(self._todo):
            raise WeightError(f"the export stream has {name} after the last planned tensor")
        bucket, slot = self._todo[self._next]
        if (name, tuple(tensor.shape), tensor.dtype) != (slot.name, slot.shape, slot.dtype):
            raise WeightError(
                f"the export stream has {name} {tuple(tensor.shape)} {tensor.dtype}, the plan has "
                f"{slot.name} {slot.shape} {slot.dtype}"
            )
        if self._hasher is not None:
            self._hasher.add(name, tensor)
        if self._flat is None:
            self._flat = self._transport.buffer(bucket)
        slot.view(self._flat).copy_(tensor)
        self._next += 1
        if slot is bucket.slots[-1]:
            flat, self._flat = self._flat, None
            self.delivered()
            platform.synchronize()  # makes the bucket's content visible to another thread
            self._delivery = InBackground(lambda: self._transport.deliver(bucket, flat))

    def delivered(self) -> None:
        """Blocks until no delivery is running. Raises the error of the last one."""
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            began = time.monotonic()
            try:
                delivery.result(self._transport.engines.deadline.left() + LATE_S, "delivering a bucket")
            finally:
                self.waiting_s += time.monotonic() - began

    def check_done(self) -> None:
        """Raises WeightError if the stream had fewer tensors than the plan."""
        if self._next < len(self._todo):
            raise WeightError(f"the export stream ended before {self._todo[self._next][1].name}")
