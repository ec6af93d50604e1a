"""The moving of bytes: blocks of rows are read from one place and written to another, one ahead of the other.

A process holds two buckets, whatever the model's size: while one is written, the next is read by a thread. All of it
runs in worker processes too, so it needs torch alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from mrl.weights.errors import WeightError
from mrl.weights.rows import Rows, memory
from mrl.weights.torch_dist_files import Item


@dataclass(frozen=True)
class Span:
    """Bytes of a file that exists."""

    file: Path
    offset: int


@dataclass(frozen=True)
class Place:
    """A block of a tensor of a torch_dist checkpoint."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """`rows` rows of `source` from `start`, cast to `dtype`, are to be written to `target`."""

    source: Rows
    start: int
    rows: int
    dtype: torch.dtype
    target: Span | Place

    @property
    def nbytes(self) -> int:
        return self.rows * self.source.shape[1] * self.dtype.itemsize


@dataclass(frozen=True)
class Share:
    """What one worker does. `archive`: the file that it writes blocks with a Place to, and `objects` before them."""

    blocks: tuple[Block, ...]
    archive: Path | None = None
    objects: tuple[tuple[str, bytes], ...] = ()


def move(share: Share) -> list[Item]:
    """Does a share, durably; where the blocks with a Place lie now. Raises WeightError, naming the file."""
    where = str(share.archive or "the weight files")
    try:
        return _write_archive(share, share.archive) if share.archive else _write_spans(share)
    except (OSError, RuntimeError) as error:
        if isinstance(error, WeightError):
            raise
        raise WeightError(f"writing {where} failed: {error}") from error


def cut(blocks: Sequence[Block], shares: int) -> list[tuple[Block, ...]]:
    """Consecutive blocks of about the same number of bytes for each share."""
    total = sum(block.nbytes for block in blocks) or 1
    parts: list[list[Block]] = [[] for _ in range(shares)]
    done = 0
    for block in blocks:
        parts[min(shares - 1, done * shares // total)].append(block)
        done += block.nbytes
    return [tuple(part) for part in parts]


def read_ahead(blocks: Sequence[Block]) -> Iterator[tuple[Block, Tensor]]:
    """(block, its rows [rows, columns]) in order; a tensor is good until the next one is asked for."""
    largest = max((block.nbytes for block in blocks), default=0)
    buffers = [bytearray(largest), bytearray(largest if len(blocks) > 1 else 0)]
    with ThreadPoolExecutor(1, thread_name_prefix="read") as reader:
        ahead: tuple[Block, Future[Tensor]] | None = None
        for number, block in enumerate(blocks):
            coming = block, reader.submit(_read, block, buffers[number % 2])
            if ahead is not None:
                yield ahead[0], ahead[1].result()
            ahead = coming
        if ahead is not None:
            yield ahead[0], ahead[1].result()


def _read(block: Block, buffer: bytearray) -> Tensor:
    columns = block.source.shape[1]
    out = torch.frombuffer(buffer, dtype=block.dtype, count=block.rows * columns).view(block.rows, columns)
    block.source.read(block.start, out)
    return out


def _write_archive(share: Share, file: Path) -> list[Item]:
    """torch.save of a tensor costs as much time for its checksum as for its bytes, and no reader of torch's asks."""
    items = []
    checksums = get_crc32_options()
    set_crc32_options(False)
    try:
        with file.open("xb") as out:
            for key, content in share.objects:
                items.append(Item(key, (), None, file.name, out.tell(), len(content)))
                out.write(content)
            for block, tensor in read_ahead(share.blocks):
                assert isinstance(block.target, Place)
                offset = out.tell()
                torch.save(tensor.view(block.target.sizes), out)
                place = block.target
                items.append(Item(place.key, place.offsets, place.sizes, file.name, offset, out.tell() - offset))
            out.flush()
            os.fsync(out.fileno())
    finally:
        set_crc32_options(checksums)
    return items


def _write_spans(share: Share) -> list[Item]:
    files: dict[Path, int] = {}
    try:
        for block, tensor in read_ahead(share.blocks):
            assert isinstance(block.target, Span)
            if block.target.file not in files:
                files[block.target.file] = os.open(block.target.file, os.O_WRONLY)
            write_at(files[block.target.file], block.target.offset, tensor)
        for descriptor in files.values():
            os.fsync(descriptor)
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    return []


def write_at(descriptor: int, offset: int, tensor: Tensor) -> None:
    view, done = memory(tensor), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def begin_worker(parent: int) -> None:
    """The parent deals with Ctrl-C; a parent that is gone takes its workers along (Linux)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
