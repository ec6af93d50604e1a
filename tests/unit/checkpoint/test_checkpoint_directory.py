"""Directories of checkpoints: which are kept, which are complete, and which are removed."""

from __future__ import annotations

import fcntl
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.checkpoint import directory, latest
from mrl.checkpoint.optimizer_shards import boxes
from mrl.checkpoint.writer_turns import in_order
from mrl.files import lock_for_reading
from tests.distributed.checkpoint.test_checkpoint import names, write
from tests.helpers import stored


def test_nodes_take_turns_by_their_first_rank() -> None:
    assert in_order(["b", "b", "a", "b", "c"]) == [0, 0, 1, 0, 2]


def test_latest_is_by_number_of_steps(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for step in (9, 10, 100):
        write(tmp_path, step)
    assert latest(tmp_path) == tmp_path / "checkpoints" / "step_100"


def test_latest_sees_only_complete_checkpoints(tmp_path: Path) -> None:
    good, unmarked, killed = write(tmp_path, 1), write(tmp_path, 2), write(tmp_path, 3)
    (unmarked / "complete").unlink()
    killed.rename(killed.with_name("step_3.tmp"))  # everything was done except the rename
    assert latest(tmp_path) == good
    with pytest.raises(ValueError, match="step_2 is not a complete checkpoint"):
        directory.read(unmarked)


def test_the_last_ones_are_kept_and_leftovers_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_7.tmp" / "actor").mkdir(parents=True)
    for step in (1, 2, 3, 4):
        write(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["step_3", "step_4"]


def test_what_was_just_saved_is_kept_even_if_others_have_more_steps(tmp_path: Path) -> None:
    for step in (20, 30):
        write(tmp_path, step)
    write(tmp_path, 10, keep_last=1)
    assert names(tmp_path) == ["step_10", "step_30"]


def test_a_step_saved_twice_is_replaced(tmp_path: Path) -> None:
    first = write(tmp_path, 5)
    (first / "actor" / "weights").write_text("of the first time")
    assert (write(tmp_path, 5) / "actor" / "weights").read_text() == "xxxxx"
    assert names(tmp_path) == ["step_5"]
    assert directory.read(first)[1] == {"step": 5}


def test_every_nth_is_kept_besides_the_last(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8, 10, 12):
        write(tmp_path, step, keep_last=1, keep_every_steps=4)
    assert names(tmp_path) == ["step_12", "step_4", "step_8"]


def test_a_best_one_stays_until_a_better_one_is_written(tmp_path: Path) -> None:
    write(tmp_path, 10, keep_last=1, best=10)
    directory.link_best(tmp_path, 10)
    write(tmp_path, 30, keep_last=1, best=20)  # the checkpoint of step 20 could not be written
    assert names(tmp_path) == ["best", "step_10", "step_30"]
    write(tmp_path, 40, keep_last=1, best=40)
    assert names(tmp_path) == ["best", "step_40"]


def test_one_that_is_removed_while_it_is_opened_is_no_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    first = write(tmp_path, 1)
    flock = fcntl.flock

    def removed_first(*arguments: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        assert directory.remove(first)
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with (
        pytest.raises(ValueError, match="step_1 was removed while it was being opened"),
        directory.hold_for_reading(first),
    ):
        raise AssertionError("not reached")


def test_a_lock_that_somebody_keeps_is_not_waited_for_without_end(tmp_path: Path) -> None:
    first = write(tmp_path, 1)
    with (first / directory.MANIFEST).open() as owner, (first / directory.MANIFEST).open() as reader:
        fcntl.flock(owner, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"step_1/complete .*locked by another process .*0\.2 s"):
            lock_for_reading(reader, timeout_s=0.2)
        fcntl.flock(owner, fcntl.LOCK_UN)
        lock_for_reading(reader, timeout_s=0.2)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (1, 4), (4, 1), (2, 3, 4), (3, 1, 2)])
def test_every_range_of_a_tensor_is_cut_into_few_boxes(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape))
    for start, end in itertools.combinations(range(len(numbers) + 1), 2):
        covered, at, count = torch.full(shape, -1), start, 0
        for offset, size in boxes(shape, start, end):
            place = tuple(slice(first, first + n) for first, n in zip(offset, size, strict=True))
            assert (covered[place] == -1).all()
            covered[place] = numbers[at : at + math.prod(size)].view(size)
            at, count = at + math.prod(size), count + 1
        inside = (numbers >= start) & (numbers < end)
        assert torch.equal(covered.view(-1), numbers.where(inside, -1)) and count <= 2 * len(shape) - 1


@pytest.mark.parametrize(("other", "difference"), [(1.0, 0.0), (1.5, 0.5), (math.nan, math.inf)])
def test_what_compares_checkpoints_sees_a_difference_and_what_is_no_number(
    other: float, difference: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "complete").write_text('{"learners": ["actor"]}')
    found = [{"norm.weight": torch.tensor([value]), "iteration": 3} for value in (1.0, other)]
    monkeypatch.setattr(stored, "stored", lambda folder: found.pop())
    worst = stored.differences(tmp_path, tmp_path, 9, lambda x, y: float((x - y).abs().max()))
    assert worst == {("actor", "weights"): difference, ("actor", "counters"): 0.0}
