"""One shared thread for all gloo groups of a process; each group's own thread would wake a hundred times a second."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

from mrl.ports import GLOO

Meet = Callable[[Any, int, int, timedelta], None]  # store of a group, this rank, number of ranks, timeout

_devices: dict[tuple[int, str], list[Any]] = {}  # by process and interfaces


def share(first: Meet | None = None) -> None:
    """Makes all later groups share a thread, instead of an earlier call. first: called before gloo makes each group"""
    plain: Any = getattr(distributed_c10d.ProcessGroupGloo, "plain", distributed_c10d.ProcessGroupGloo)

    class ProcessGroupGloo(plain):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = plain._Options()
            options._devices, options._timeout = devices(plain), timeout
            if first is not None:
                first(store, rank, size, timeout)
            super().__init__(store, rank, size, options)

    ProcessGroupGloo.plain = plain
    distributed_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]


def devices(group: Any) -> list[Any]:
    """Returns the devices of the comma-separated interfaces in the environment, else of the host name's address.

    They are made at first use, per process: a fork has no thread for inherited ones.
    """
    names = os.environ.get(GLOO, "")
    key = os.getpid(), names
    if key not in _devices:
        own = [group.create_device(interface=name) for name in names.split(",") if name]
        _devices[key] = own or [group.create_default_device()]
    return _devices[key]
