"""Moving bytes: blocks of rows are read from one place and written to another.

A worker is a thread with one bucket, independent of the model's size. The slow operations (reading, casting, writing,
waiting for the disk) release the GIL, so that one worker reads while another writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mrl.files import file_error
from mrl.weights.disk.rows import Rows, require_finite, tensor_memory
from mrl.weights.disk.torch_dist_files import BlockLocation
from mrl.weights.errors import WeightError

FLUSH_BYTES = 32 << 20  # flush early, so that the disk does not idle until the kernel starts writing


@dataclass(frozen=True)
class FileRange:
    """Bytes of an existing file."""

    file: Path
    offset: int


@dataclass(frozen=True)
class TensorBlock:
    """A block of a tensor of a torch_dist checkpoint."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """`rows` rows of `source` from `start`, to be cast to `dtype` and written to `target`."""

    source: Rows
    start: int
    rows: int
    dtype: torch.dtype
    target: FileRange | TensorBlock

    @property
    def nbytes(self) -> int:
        return self.rows * self.source.shape[1] * self.dtype.itemsize


@dataclass(frozen=True)
class WorkerShare:
    """Work of one worker. `archive`: file for every TensorBlock, with `objects` before them."""

    blocks: tuple[Block, ...]
    archive: Path | None = None
    objects: tuple[tuple[str, bytes], ...] = ()


def write_share(share: WorkerShare, stopped: Callable[[], bool]) -> list[BlockLocation]:
    """Writes a share durably and returns the locations of its TensorBlocks. Stops between two blocks if `stopped`.

    Raises WeightError, which names the file.
    """
    where = str(share.archive or "the weight files")
    try:
        return _write_archive(share, share.archive, stopped) if share.archive else _write_spans(share, stopped)
    except (OSError, RuntimeError) as error:
        if isinstance(error, WeightError):
            raise
        raise WeightError(f"writing {where} failed: {file_error(error)}") from error


def split_blocks(blocks: Sequence[Block], shares: int) -> list[tuple[Block, ...]]:
    """Splits blocks into `shares` consecutive parts of about the same number of bytes."""
    total = sum(block.nbytes for block in blocks) or 1
    parts: list[list[Block]] = [[] for _ in range(shares)]
    done = 0
    for block in blocks:
        parts[min(shares - 1, done * shares // total)].append(block)
        done += block.nbytes
    return [tuple(part) for part in parts]


class _BlockBuffer:
    """Memory for one block at a time."""

    def __init__(self, share: WorkerShare) -> None:
        self._memory = torch.empty(max((block.nbytes for block in share.blocks), default=0), dtype=torch.uint8)

    def read(self, block: Block) -> Tensor:
        """Returns the block's rows [rows, columns], in a storage of exactly their size, valid until the next call.
        Raises WeightError for NaN or infinity.
        """
        columns = block.source.shape[1]
        out = torch.frombuffer(tensor_memory(self._memory), dtype=block.dtype, count=block.rows * columns)
        values = out.view(block.rows, columns)
        block.source.read(block.start, values)
        require_finite(block.source, block.start, values)
        return values


def _write_archive(share: WorkerShare, file: Path, stopped: Callable[[], bool]) -> list[BlockLocation]:
    items, bucket, flushed = [], _BlockBuffer(share), 0
    with file.open("xb") as out:
        for key, content in share.objects:
            items.append(BlockLocation(key, (), None, file.name, out.tell(), len(content)))
            out.write(content)
        for block in share.blocks:
            if stopped():
                break
            assert isinstance(block.target, TensorBlock)
            offset, place = out.tell(), block.target
            torch.save(bucket.read(block).view(place.sizes), out)
            items.append(BlockLocation(place.key, place.offsets, place.sizes, file.name, offset, out.tell() - offset))
            if out.tell() - flushed >= FLUSH_BYTES:
                flushed = out.tell()
                os.fdatasync(out.fileno())
        out.flush()
        os.fsync(out.fileno())
    return items


def _write_spans(share: WorkerShare, stopped: Callable[[], bool]) -> list[BlockLocation]:
    files: dict[Path, int] = {}
    bucket, pending = _BlockBuffer(share), 0
    try:
        for block in share.blocks:
            if stopped():
                break
            assert isinstance(block.target, FileRange)
            if block.target.file not in files:
                files[block.target.file] = os.open(block.target.file, os.O_WRONLY)
            descriptor = files[block.target.file]
            write_at(descriptor, block.target.offset, bucket.read(block))
            pending += block.nbytes
            if pending >= FLUSH_BYTES:
                pending = 0
                os.fdatasync(descriptor)
        for descriptor in files.values():
            os.fsync(descriptor)
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    return []


def write_at(descriptor: int, offset: int, tensor: Tensor) -> None:
    """Writes the bytes of a contiguous tensor of any shape to the file from `offset`."""
    view, done = tensor_memory(tensor), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
