"""Weight sync between processes, without an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mrl.weights.meta import TensorMeta
from mrl.weights.sync.payload import SharedBuffer, pickle_by_value, plan_buckets
from tests.unit.weights.test_sync_parts import meta


def fill(metas: list[TensorMeta], flat: Tensor) -> list[tuple[str, Tensor]]:
    (bucket,) = plan_buckets(metas, limit=1 << 20)
    named = bucket.views(flat)
    for _, view in named:
        view.copy_(torch.randn(view.shape))
    return named


READER = """
import sys
from mrl.inference.transformers_engine.weights import read_payload
for text in sys.stdin.read().split():
    for name, tensor in read_payload(text, None):
        print(name, tuple(tensor.shape), tensor.dtype, tensor.double().sum().item())
"""


def test_payloads_arrive_in_another_process() -> None:
    """Tensors arrive in another process by value and through shared memory."""
    metas = [meta("a", 4, 3), meta("b", 6, dtype=torch.bfloat16), meta("c", 2)]
    shared = SharedBuffer(1 << 12)
    named = fill(metas, shared.flat)
    (bucket,) = plan_buckets(metas, limit=1 << 20)
    texts = (pickle_by_value(bucket, shared.flat), shared.pickle(bucket, readers=1))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    reader = [sys.executable, "-c", READER]
    done = subprocess.run(reader, input="\n".join(texts), env=environment, capture_output=True, text=True, timeout=120)
    expected = [f"{n} {tuple(t.shape)} {t.dtype} {t.double().sum().item()}" for n, t in named]
    assert done.stdout.splitlines() == 2 * expected, done.stderr


INTERRUPTED = """
import signal
from mrl.weights.sync.payload import start_manager
signal.signal(signal.SIGALRM, lambda number, frame: print("heard", flush=True))
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)  # it takes .2 s
start_manager()
signal.setitimer(signal.ITIMER_REAL, 0)
assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""


def test_signals_while_torchs_process_starts_are_heard_after_it() -> None:
    """Signals during the start of torch's process take effect afterwards. torch alone would read forever."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("heard")


SENDER = """
import os, socket, psutil
from mrl.weights.sync.payload import SharedBuffer
def open_files(process):
    folder = f"/proc/{process}/fd"
    return {os.readlink(f"{folder}/{name}") for name in os.listdir(folder) if os.path.islink(f"{folder}/{name}")}
before = open_files("self")
pair = socket.socketpair()
for end in pair:
    end.set_inheritable(True)  # as gloo's are
mine = open_files("self") - before
SharedBuffer(8)
(manager,) = psutil.Process().children(recursive=True)
print("shm_manager" in manager.exe(), len(mine) >= 2, mine & open_files(manager.pid))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_dead_sender_leaves_no_connection_open() -> None:
    """A dead sender leaves no open connection in torch's shared-memory process, which outlives it by seconds. Other
    ranks would wait as long."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", SENDER], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "True True set()\n", done.stderr
