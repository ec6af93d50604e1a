"""The threads that move a conversion's blocks: a failing or hanging one ends all of them, with a message."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mrl.weights.convert import worker_pool
from mrl.weights.convert.blocks import Block, FileRange, WorkerShare
from mrl.weights.convert.worker_pool import WorkerPool
from mrl.weights.disk import hf_rows
from mrl.weights.disk.hf_rows import IndexedRows
from mrl.weights.disk.rows import FileRows
from mrl.weights.disk.safetensors_io import HFCheckpoint
from mrl.weights.errors import WeightError

ROWS = 4


@dataclass(frozen=True)
class Waiting:
    """Rows that are read one block at a time, each after `turn` is set."""

    turn: threading.Event
    read_so_far: list[int]
    shape: tuple[int, int] = (ROWS, 1)
    dtype: torch.dtype = torch.uint8

    def read(self, start: int, out: Tensor) -> None:
        assert self.turn.wait(60)
        self.read_so_far.append(start)
        out.zero_()


def share(source: FileRows | Waiting, target: Path) -> WorkerShare:
    return WorkerShare(tuple(Block(source, row, 1, torch.uint8, FileRange(target, row)) for row in range(ROWS)))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").write_bytes(bytes(ROWS))
    return tmp_path / "target"


def test_what_is_cast_is_read_in_pieces(tmp_path: Path) -> None:
    numbers = torch.randn(3_000, 300, dtype=torch.float64)
    (tmp_path / "source").write_bytes(numbers.numpy().tobytes())
    out = torch.empty(2_000, 300, dtype=torch.bfloat16)
    FileRows(tmp_path / "source", 0, (3_000, 300), torch.float64).read(500, out)
    assert torch.equal(out, numbers[500:2_500].bfloat16())


def test_one_that_fails_stops_the_others(tmp_path: Path, target: Path) -> None:
    turn, read = threading.Event(), list[int]()
    missing = share(FileRows(tmp_path / "gone", 0, (ROWS, 1), torch.uint8), target)
    stop = threading.Timer(0.3, turn.set)
    stop.start()
    with pytest.raises(WeightError, match=r"No such file or directory: '.*gone'"):
        WorkerPool(2, 20.0).write_shares([missing, share(Waiting(turn, read), target)])
    assert len(read) < 2, "it went on although the conversion had failed"


def test_one_that_hangs_is_not_waited_for(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "END_TIMEOUT_S", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WeightError, match=r"1 worker.* 0\.5 s"):
        WorkerPool(1, 0.5).write_shares([share(FileRows(tmp_path / "pipe", 0, (ROWS, 1), torch.uint8), target)])


def test_a_file_is_opened_once_for_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is opened once for all threads, because a pickled file is read into memory as a whole."""
    torch.save({"a": torch.arange(12.0).view(4, 3)}, tmp_path / "pytorch_model.bin")
    opened = []

    def slow(path: Path, allow_pickle: bool) -> HFCheckpoint:
        opened.append(path)
        time.sleep(0.2)
        return HFCheckpoint(path, allow_pickle)

    monkeypatch.setattr(hf_rows, "HFCheckpoint", slow)
    rows = IndexedRows(tmp_path, True, "a", (4, 3), torch.float32, None)
    found = [torch.empty(4, 3) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda out: rows.read(0, out), found))
    assert len(opened) == 1 and all(torch.equal(out, torch.arange(12.0).view(4, 3)) for out in found)
