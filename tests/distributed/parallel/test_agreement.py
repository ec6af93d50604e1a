"""Error propagation over ranks: if a rank fails in a collective step, all raise the same error, and none waits."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mrl.checkpoint.agreement import CheckpointAgreement
from mrl.parallel import CollectiveErrorCheck, gather, rank
from mrl.parallel.error_check import by_reason
from mrl.weights.agreement import SyncAgreement, raise_together
from mrl.weights.convert.worker_pool import WorkerPool
from mrl.weights.errors import SyncMismatch

WORLD = 3
LIMIT_S = 1.0  # timeout of the process group with the silent rank


class Refused(RuntimeError):
    """The error that the ranks of these tests raise."""


class Room(CollectiveErrorCheck[str]):
    def report(self, error: BaseException) -> str:
        return f"{type(error).__name__}: {error}"

    def combined_error(self, what: str, reports: Mapping[int, str]) -> Refused:
        return Refused(f"{what} failed: {by_reason(reports)}")

    def peer_lost(self, what: str, error: RuntimeError, cause: BaseException | None) -> None:
        raise Refused(f"nobody answers while {what} (here: {cause})") from error


def fails_on(*ranks: int) -> int:
    if rank() in ranks:
        raise OSError("disk full" if rank() else "no such file")
    return 10 * rank()


def pushed() -> None:
    fails_on(0)
    if rank() == 1:
        raise SyncMismatch("3 of 9 parameters differ")


def planned() -> None:
    """Raises as torch does: on every rank, with the errors gathered from all."""
    raise CheckpointException("plan", {number: (OSError(f"disk {number}"), None) for number in (1, 2)})  # type: ignore


def raises(error: Exception) -> None:
    raise error


STEPS: dict[str, Callable[[Room], Any]] = {
    "each": lambda room: room.each("counting", lambda: 10 * rank()),
    "together": lambda room: room.together("locking", lambda: (rank(), threading.Lock()))[0],  # cannot be pickled
    "on_main": lambda room: room.on_main("asking", lambda: f"rank {rank()} says so"),
    "collect": lambda room: room.collect("collecting", 10 * rank(), owner=1),
    "gather": lambda room: gather(10 * rank(), room.group),
    "two fail": lambda room: room.each("writing", lambda: fails_on(1, 2)),
    "all fail": lambda room: room.together("writing", lambda: fails_on(0, 1, 2)),
    "rank 0 fails": lambda room: room.on_main("opening", lambda: fails_on(0)),
    "load": lambda room: raise_together(["no norm", f"shard {min(rank(), 1)}"], "it does not fit"),
    "convert": lambda room: WorkerPool(1, 20.0).on_main("completing it", lambda: fails_on(0)),
    "a bug": lambda room: WorkerPool(1, 20.0).on_main("completing it", lambda: {}["key"]),
    "plan": lambda room: CheckpointAgreement().together("planning", planned),
    "save": lambda room: CheckpointAgreement(room.group).together("saving", lambda: raises(ValueError("too small"))),
    "no words": lambda room: SyncAgreement(20).on_main("sending", lambda: raises(TimeoutError())),
    "push": lambda room: SyncAgreement(20).each("sending", pushed),
    "afterwards": lambda room: room.each("counting", lambda: 10 * rank()),
}


def outcome(step: Callable[[], Any]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        found: dict[str, Any] = {"value": step()}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "cause": type(error.__cause__).__name__}
    return found | {"seconds": time.monotonic() - began}


def life(number: int, store: Path, pipe: Any) -> None:
    """Runs one rank. At the end rank 2 stays silent, and then ends."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=WORLD)
    room, impatient = Room(), Room(dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT_S)))
    outcomes = {name: outcome(lambda step=step: step(room)) for name, step in STEPS.items()}
    if number < 2:
        outcomes["silent"] = outcome(lambda: impatient.together("waiting", lambda: fails_on(1)))
    gather(None)
    if number < 2:
        outcomes["dead"] = outcome(lambda: room.each("waiting", lambda: fails_on()))
    pipe.send(outcomes)
    os._exit(0)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Returns each rank's outcome of every step."""
    fork, store = multiprocessing.get_context("fork"), tmp_path_factory.mktemp("world") / "store"
    pipes = [fork.Pipe() for _ in range(WORLD)]
    world = [fork.Process(target=life, args=(i, store, pipe[1]), daemon=True) for i, pipe in enumerate(pipes)]
    try:
        for process in world:
            process.start()
        assert all(pipe.poll(60) for pipe, _ in pipes), "a rank hangs"
        return [pipe.recv() for pipe, _ in pipes]
    finally:
        for process in world:
            process.kill()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("each", [[0, 10, 20]] * WORLD),
        ("together", [0, 1, 2]),
        ("on_main", ["rank 0 says so"] * WORLD),
        ("collect", [[], [0, 10, 20], []]),
        ("gather", [[0, 10, 20]] * WORLD),
        ("afterwards", [[0, 10, 20]] * WORLD),
    ],
)
def test_what_every_rank_has(step: str, expected: list[Any], ranks: list[dict[str, dict[str, Any]]]) -> None:
    assert [seen[step].get("value") for seen in ranks] == expected


@pytest.mark.parametrize(
    ("step", "error", "causes"),
    [
        ("two fail", "writing failed: rank 1, 2: OSError: disk full", ["NoneType", "OSError", "OSError"]),
        (
            "all fail",
            "writing failed: rank 0: OSError: no such file; rank 1, 2: OSError: disk full",
            ["OSError"] * WORLD,
        ),
        ("rank 0 fails", "opening failed: rank 0: OSError: no such file", ["OSError", "NoneType", "NoneType"]),
    ],
)
def test_an_error_is_everybody_s(
    step: str, error: str, causes: list[str], ranks: list[dict[str, dict[str, Any]]]
) -> None:
    assert [seen[step].get("error") for seen in ranks] == [f"Refused: {error}"] * WORLD
    assert [seen[step]["cause"] for seen in ranks] == causes, "the traceback is where the error was"


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("load", "WeightError: it does not fit:\n  - no norm (rank 0)\n  - shard 0 (rank 0)\n  - shard 1 (rank 1)"),
        ("convert", "WeightError: completing it failed:\n  - no such file (rank 0)"),
        ("a bug", "WeightError: completing it failed:\n  - KeyError: 'key' (rank 0)"),
        ("plan", "CheckpointError: planning failed: rank 1: OSError: disk 1; rank 2: OSError: disk 2"),
        ("save", "CheckpointError: saving failed: ValueError: too small"),
        ("no words", "SyncError: sending failed: rank 0: TimeoutError: "),
        ("push", "SyncMismatch: sending failed: rank 0: no such file; rank 1: 3 of 9 parameters differ"),
    ],
)
def test_a_room_has_its_own_words(step: str, error: str, ranks: list[dict[str, dict[str, Any]]]) -> None:
    assert [seen[step].get("error") for seen in ranks] == [error] * WORLD


@pytest.mark.parametrize(("step", "here"), [("silent", ["None", "disk full"]), ("dead", ["None", "None"])])
def test_a_rank_that_does_not_answer(step: str, here: list[str], ranks: list[dict[str, dict[str, Any]]]) -> None:
    """If a rank does not answer, the others name the step and their own error within the group's timeout."""
    errors = [seen[step].get("error") for seen in ranks[:2]]
    assert errors == [f"Refused: nobody answers while waiting (here: {mine})" for mine in here]
    assert all(seen[step]["seconds"] < LIMIT_S + 10 for seen in ranks[:2])


def test_a_world_of_one_needs_no_process_group() -> None:
    room = Room()
    assert room.each("counting", lambda: 1) == [1] and room.collect("collecting", 2) == [2]
    assert room.on_main("asking", lambda: "yes") == "yes"
    with pytest.raises(Refused, match="^opening failed: OSError: no such file$"):
        room.together("opening", lambda: fails_on(0))
