"""The lock of a run directory, held by another process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.observe import (
    RunLocked,
)
from mrl.observe.lock import Lock

ROOT = Path(__file__).parents[3]

HOLD = """
import sys, time
from pathlib import Path
from mrl.observe.lock import Lock
Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(120)
"""


def test_a_live_owner_is_respected_and_a_dead_one_replaced(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(file)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "held\n"
        with pytest.raises(RunLocked, match=f"in use by process {owner.pid} on {socket.gethostname()}"):
            Lock(file)
    finally:
        owner.kill()
    owner.wait(timeout=30)
    lock = Lock(file)
    assert json.loads(file.read_text())["pid"] != owner.pid
    lock.release()
    assert not file.exists()
