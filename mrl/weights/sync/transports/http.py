"""Transport of buckets by value in the request itself: works wherever the engine's port is reachable; the slowest
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mrl.weights.sync.payload import Bucket, pickle_by_value
from mrl.weights.sync.transports.base import Transport, double_buffer, largest_bucket_bytes


class Http(Transport):
    name = "http"
    sends_deltas = True
    _flats: Iterator[Tensor] = iter(())

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        self._flats = double_buffer(lambda: torch.empty(largest_bucket_bytes(buckets), dtype=torch.uint8), buckets)

    def buffer(self, bucket: Bucket) -> Tensor:
        return next(self._flats)

    def send(self, bucket: Bucket, flat: Tensor) -> None:
        payloads = [pickle_by_value(bucket, flat)] * self.engines.tensor
        self.engines.call(lambda client: client.update_weights_from_tensor(payloads))

    def release(self, failed: bool) -> None:
        self._flats = iter(())
