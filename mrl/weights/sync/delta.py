"""Delta weight sync, on the trainer: what each sender sent last, and the changes since then.

Only the hop to the engines shrinks. Transports through memory gain nothing from it, and `disk` writes whole files.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.inference.delta import DeltaMessage, encode
from mrl.weights.sync.payload import Bucket


@dataclass(frozen=True)
class Transition:
    """Update of the engines from the weights `base` to `version`. base None: whole weights."""

    base: str | None
    version: str


class DeltaState:
    """State of one rank: a copy of its buckets as sent last, in host memory. A failed sync invalidates the copies."""

    def __init__(self, full_every: int) -> None:
        self._full_every, self._since_full = full_every, 0
        self._sent: dict[str, Tensor] = {}  # by the bucket's first tensor
        self._last: str | None = None  # version of `_sent`
        self._before: str | None = None
        self._again = False
        self.now = Transition(None, "")
        self.is_proved = False  # a delta sync has been verified

    def next(self, again: bool, engines_have_last: bool) -> Transition:
        """Returns rank 0's choice for the next sync; `again`: the last one is repeated for one engine."""
        if again:
            return Transition(None, self._last or secrets.token_hex(8))
        full = not engines_have_last or self._since_full + 1 >= self._full_every
        return Transition(None if full else self._last, secrets.token_hex(8))

    def begin(self, now: Transition, again: bool) -> None:
        """Begins a sync, the same on every rank."""
        self.now, self._again = now, again
        self._before, self._last = self._last, None

    def commit(self) -> None:
        """Ends a sync that has succeeded on every rank."""
        if self._again:
            self._last = self._before
            return
        self._since_full = self._since_full + 1 if self.now.base is not None else 0
        self._last = self.now.version

    def message(self, step: str) -> DeltaMessage:
        return DeltaMessage(step, self.now.base, self.now.version)  # type: ignore[arg-type]

    def changes(self, bucket: Bucket, flat: Tensor) -> tuple[DeltaMessage, Tensor | None]:
        """Returns the changes of a bucket, in `flat` uint8 [at least bucket.nbytes]: uint8 [m], or None if the whole
        bucket must be sent.
        """
        unit = max(slot.dtype.itemsize for slot in bucket.slots)
        data, changed = None, 0
        if self.now.base is not None:
            part = flat[: bucket.nbytes]
            data, changed = encode(part, self._sent[bucket.slots[0].name].to(part.device), unit)
        if data is not None and changed and not _is_maskable(bucket, flat):
            data = None
        tensors = [(slot.name, str(slot.dtype).removeprefix("torch."), slot.shape) for slot in bucket.slots]
        nbytes = bucket.nbytes if data is None else data.numel()
        update = (self.now.base, self.now.version)
        return DeltaMessage("bucket", *update, tensors, unit, changed, nbytes), data

    def sent(self, bucket: Bucket, flat: Tensor) -> None:
        """Keeps a copy of a bucket that every engine has loaded."""
        if self._again:
            return
        name = bucket.slots[0].name
        if name not in self._sent:
            self._sent[name] = torch.empty(bucket.nbytes, dtype=torch.uint8)
        self._sent[name].copy_(flat[: bucket.nbytes])


def _is_maskable(bucket: Bucket, flat: Tensor) -> bool:
    """True if NaN can mark unchanged elements: all tensors are floating, and none has a NaN."""
    views = [view for _, view in bucket.views(flat)]
    return all(view.is_floating_point() for view in views) and not bool(
        torch.stack([view.isnan().any() for view in views]).any()
    )
