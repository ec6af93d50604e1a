"""Host memory available to this process, since a job or container may have less than the machine."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

import psutil

# files of a control group: the limit, the use, and the part of it that the kernel can reclaim
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_host_memory(proc: Path = Path("/proc/self"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns bytes: the machine's free memory or, if less, what this process's control groups leave (Linux)."""
    free: float = psutil.virtual_memory().available
    with suppress(OSError):
        for line in (proc / "cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if names not in ("", "memory"):
                continue
            root, files = (mounted / names, _V1 if names else _V2)
            here = root / path.lstrip("/")
            free = min(
                free, *(_left(folder, *files) for folder in (here, *here.parents) if folder.is_relative_to(root))
            )
    return max(0, int(free))


def _left(group: Path, limit: str, used: str, spare: str) -> float:
    """Bytes left in a control group; infinite without a limit or without the group."""
    try:
        most = float((group / limit).read_text().replace("max", "inf"))
        taken = int((group / used).read_text())
        told = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return math.inf
    return most - taken + int(told.get(spare, 0))
