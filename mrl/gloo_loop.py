"""One thread for all of gloo's groups of a process: each would have its own, which wakes a hundred times a second."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

from mrl.ports import GLOO

Meet = Callable[[Any, int, int, timedelta], None]  # of a group's store, this rank, how many there are, and the time-out

_devices: dict[tuple[int, str], list[Any]] = {}  # by the process and the interfaces that they listen on


def share(first: Meet | None = None) -> None:
    """For all groups made from now on. first: what each does before gloo makes it."""
    plain = distributed_c10d.ProcessGroupGloo

    class ProcessGroupGloo(plain):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = plain._Options()  # type: ignore[attr-defined]
            options._devices, options._timeout = devices(plain), timeout
            if first is not None:
                first(store, rank, size, timeout)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]


def devices(group: Any) -> list[Any]:
    """Of the interfaces that the environment names, in a row with commas as torch has them, else of the address that
    the host's name has. Made at the first use; a copy of this process has no thread for those that it inherits."""
    names = os.environ.get(GLOO, "")
    key = os.getpid(), names
    if key not in _devices:
        own = [group.create_device(interface=name) for name in names.split(",") if name]
        _devices[key] = own or [group.create_default_device()]
    return _devices[key]
