"""Run under torchrun with 2 processes: weight syncs to failing engines. Usage: sync_failures.py JOBS RESULTS MODEL_DIR

JOBS: JSON list of {name, urls, transport, timeout_s, spans, lacks}. With two engines the second one is on node 1, as
rank 1 is. spans: the engine is on both nodes, with a tensor-parallel rank on each; lacks: the node without room for a
second handle. RESULTS: {name: [{error, seconds} of each rank]}. Both ranks send, and the export stream is collective: a
rank that stopped reading it after an error would block the other one.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrl.config.schema import SyncConfig
from mrl.parallel import Nodes
from mrl.weights.errors import SyncError
from mrl.weights.sync.payload import Bucket, plan_buckets
from mrl.weights.sync.transports import SharedMemory
from mrl.weights.sync.weight_sync import WeightSync
from tests.helpers.sync_tools import FileExporter


class SmallBuckets(WeightSync):
    """A sync with buckets small enough for several per rank."""

    def _plan(self, sender: int) -> tuple[Bucket, ...]:
        return plan_buckets([meta for meta in self._metas if meta.sender == sender], 1 << 16)


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Makes the handles of a second bucket fail."""
    real, made = SharedMemory.handles, []

    def handles(self: SharedMemory, *bucket: Any) -> list[str]:
        made.append(bucket)
        if len(made) > 1:
            raise OSError("no room")
        return real(self, *bucket)

    SharedMemory.handles = handles  # type: ignore[method-assign]
    try:
        yield
    finally:
        SharedMemory.handles = real  # type: ignore[method-assign]


def push(job: dict[str, Any], exporter: FileExporter) -> dict[str, Any]:
    cfg = SyncConfig(transport=job["transport"], timeout_s=job["timeout_s"])
    urls, spans = job["urls"], job.get("spans", False)
    homes = {url: (node,) for node, url in enumerate(urls)} if len(urls) > 1 else {}
    homes = dict.fromkeys(urls, (0, 1)) if spans else homes
    sync = SmallBuckets(exporter, urls, cfg, 1 + spans, nodes=Nodes((0, 1), exporter.rank), homes=homes)
    started = time.monotonic()
    error = ""
    try:
        with no_room() if job.get("lacks") == exporter.rank else contextlib.nullcontext():
            sync.update_weights("7")
    except SyncError as caught:
        error = str(caught)
    seconds = time.monotonic() - started
    sync.close()
    return {"error": error, "seconds": seconds, "buckets": len(sync._buckets)}


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    exporter = FileExporter(Path(sys.argv[3]), rank, lambda name: int(".layers.1." in name or "lm_head" in name))
    exporter.gather = dist.barrier
    results = {}
    for job in json.loads(Path(sys.argv[1]).read_text()):
        outcome = [None, None]
        dist.all_gather_object(outcome, push(job, exporter))
        results[job["name"]] = outcome
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.destroy_process_group()


main()
