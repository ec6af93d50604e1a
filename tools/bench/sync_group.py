"""The group `sync` of `python -m tools.bench`: copies from a trainer's tensors into an engine's."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from typing import Any

import torch

from mrl.weights.meta import TensorMeta
from mrl.weights.sync.payload import SharedBuffer, pickle_by_value, plan_buckets

SHAPES = ((896, 896), (128, 896), (4864, 896), (896, 4864), (896,)) * 12  # bfloat16, 0.23 GB
BUCKET_BYTES = 128 << 20


def weight_sync() -> dict[str, Callable[[], Any]]:
    """Weight sync of 60 bfloat16 tensors, 0.23 GB, through memory that two processes share."""
    weights = {f"layer.{i}.weight": torch.randn(shape).bfloat16() for i, shape in enumerate(SHAPES)}
    engine = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    metas = [TensorMeta(name, tuple(tensor.shape), tensor.dtype, 0) for name, tensor in weights.items()]
    buckets = plan_buckets(metas, BUCKET_BYTES)
    shared = [SharedBuffer(max(bucket.nbytes for bucket in buckets)) for _ in buckets[:2]]
    plain = torch.empty(BUCKET_BYTES * 2, dtype=torch.uint8)

    def limit() -> None:
        for bucket in buckets:
            for name, view in bucket.views(plain):
                view.copy_(weights[name])
            for name, view in bucket.views(plain):
                engine[name].copy_(view)

    def receive(message: str) -> None:
        for name, tensor in pickle.loads(base64.b64decode(message)):
            engine[name].copy_(tensor)

    def by_name() -> None:
        for i, bucket in enumerate(buckets):
            buffer = shared[i % len(shared)]
            for name, view in bucket.views(buffer.flat):
                view.copy_(weights[name])
            receive(buffer.pickle(bucket, 1))

    def by_value() -> None:
        for bucket in buckets:
            for name, view in bucket.views(plain):
                view.copy_(weights[name])
            receive(pickle_by_value(bucket, plain))

    return {"limit: two copies": limit, "mrl, shared memory": by_name, "mrl, http's messages": by_value}
