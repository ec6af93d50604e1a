"""Transport by disk: the whole model as safetensors files in a temporary directory, which the engines then load."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mrl.files import replacing
from mrl.weights.sync.payload import Bucket
from mrl.weights.sync.transports.base import Transport, double_buffer, largest_bucket_bytes


class Disk(Transport):
    """Every sender writes its own files; rank 0 makes the engines load the directory and removes it.

    The directory must be the same for all senders and engines: `SenderLocation.directory`. By default that is a
    temporary directory, which requires a single machine. Each sync has a folder of its own there: a late thread of a
    failed sync, on a disk that had hung, writes nothing into the next one.
    """

    name = "disk"
    uses_session = False
    needs_directory = True
    _flats: Iterator[Tensor] = iter(())
    _syncs = 0  # equal on all senders

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        self._syncs += 1
        self._directory.mkdir(exist_ok=True)
        self._flats = double_buffer(lambda: torch.empty(largest_bucket_bytes(buckets), dtype=torch.uint8), buckets)
        self._count = 0

    def buffer(self, bucket: Bucket) -> Tensor:
        return next(self._flats)

    def send(self, bucket: Bucket, flat: Tensor) -> None:
        name = f"rank-{self.location.rank:05d}-{self._count:05d}.safetensors"
        self._count += 1
        with replacing(self._directory / name) as partial:
            save_file(dict(bucket.views(flat)), partial, metadata={"format": "pt"})

    def commit(self, version: str) -> None:
        directory, deadline = str(self._directory), self.engines.deadline
        # refused while requests run, and one that has just been answered still counts
        self.engines.call(lambda client: client.flush_when_idle(deadline.left()))
        self.engines.call(lambda client: client.update_weights_from_disk(directory, weight_version=version))

    def release(self, failed: bool) -> None:
        self._flats = iter(())
        if self.location.rank == 0 and self.location.directory is not None:
            shutil.rmtree(self.location.directory, ignore_errors=True)
            self.location.directory.mkdir(exist_ok=True)

    def close(self) -> None:
        if self.location.rank == 0 and self.location.directory is not None:
            shutil.rmtree(self.location.directory, ignore_errors=True)

    @property
    def _directory(self) -> Path:
        assert self.location.directory is not None
        return self.location.directory / str(self._syncs)


def make_directory(parent: Path | None) -> Path:
    """Creates a directory that only this run uses."""
    return Path(tempfile.mkdtemp(prefix="mrl-weights-", dir=parent))
