"""Construction of gloo process groups, of which a mesh has some 25."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch

from mrl import gloo_loop
from mrl.platform.process import WorldError
from mrl.platform.registry import Stage, adaptation

_POLL_S = 0.001


@adaptation(
    "one_gloo_loop",
    why="each of gloo's groups has a thread that wakes a hundred times a second: the groups of a process share one",
    stage=Stage.BEFORE_IMPORT,
    needed=lambda: torch.distributed.is_gloo_available() and not torch.cuda.is_available(),
)
def one_gloo_loop() -> None:
    gloo_loop.share(_wait_for_all)


def _wait_for_all(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Blocks until all ranks of the group are here, since Ctrl-C is not handled while gloo itself waits for them.

    Rank 0 goes on last, so that it alone never waits inside gloo for a stopped rank; the launcher ends the others after
    it. Raises WorldError if a rank does not come in time.
    """
    here = {f"rank {number} of {size}": number for number in range(size)}
    going_on = {f"{name} goes on": number for name, number in here.items() if number}
    store.set(f"rank {rank} of {size}", "here")
    wanted, end = here if rank else going_on, time.monotonic() + timeout.total_seconds()
    while wanted and not store.check(list(wanted)):
        if time.monotonic() > end:
            missing = ", ".join(str(number) for name, number in wanted.items() if not store.check([name]))
            within = f"within {timeout.total_seconds():g} s"
            raise WorldError(f"a gloo group of {size} ranks did not form {within}: member {missing} did not join")
        time.sleep(_POLL_S)
    if rank:
        store.set(f"rank {rank} of {size} goes on", "")
