"""gloo's process groups, of which a mesh has some 25."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from mrl.platform.process import WorldError
from mrl.platform.registry import Stage, adaptation

_POLL_S = 0.001

_devices: dict[tuple[int, str | None], Any] = {}  # by the process and the interface that they listen on


@adaptation(
    "one_gloo_loop",
    why="each of gloo's groups has a thread that wakes a hundred times a second: the groups of a process share one",
    stage=Stage.BEFORE_IMPORT,
    needed=lambda: torch.distributed.is_gloo_available() and not torch.cuda.is_available(),
)
def one_gloo_loop() -> None:
    plain = distributed_c10d.ProcessGroupGloo

    class ProcessGroupGloo(plain):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = plain._Options()  # type: ignore[attr-defined]
            options._devices, options._timeout = [_device(plain)], timeout
            _wait_for_all(store, rank, size, timeout)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]


def _wait_for_all(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Until all ranks of the group make it. While gloo itself waits for them, Ctrl-C is not heard.

    Raises WorldError if one does not come in time.
    """
    names = {number: f"rank {number} of {size}" for number in range(size)}
    store.set(names[rank], "here")
    end = time.monotonic() + timeout.total_seconds()
    while not store.check(list(names.values())):
        if time.monotonic() > end:
            missing = ", ".join(name for name in names.values() if not store.check([name]))
            raise WorldError(f"a group did not form within {timeout.total_seconds():g} s: {missing} did not come")
        time.sleep(_POLL_S)


def _device(group: Any) -> Any:
    """Made at the first use; a copy of this process has no thread for the one that it inherits."""
    key = os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME")
    if key not in _devices:
        _devices[key] = group.create_default_device()
    return _devices[key]
