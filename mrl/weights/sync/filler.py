"""From the export stream to full buckets."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from mrl.weights.errors import WeightError
from mrl.weights.sync.checksum import StreamHasher
from mrl.weights.sync.payload import Bucket
from mrl.weights.sync.transports import Transport


class Filler:
    """Writes the stream's tensors into buckets and sends each bucket when it is full."""

    def __init__(self, transport: Transport, buckets: Sequence[Bucket], hasher: StreamHasher | None) -> None:
        self._transport, self._hasher = transport, hasher
        self._todo = [(bucket, slot) for bucket in buckets for slot in bucket.slots]
        self._next = 0
        self.sending_s = 0.0

    def take(self, name: str, tensor: Tensor) -> None:
        """Puts the stream's next tensor, of any shape, into its place; sends the bucket that it fills.

        Raises WeightError if this is not the tensor that the plan has next.
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
        flat = self._transport.buffer(bucket)
        slot.view(flat).copy_(tensor)
        self._next += 1
        if slot is bucket.slots[-1]:
            began = time.monotonic()
            self._transport.deliver(bucket, flat)
            self.sending_s += time.monotonic() - began

    def check_done(self) -> None:
        """Raises WeightError if the stream had fewer tensors than the plan."""
        if self._next < len(self._todo):
            raise WeightError(f"the export stream ended before {self._todo[self._next][1].name}")
