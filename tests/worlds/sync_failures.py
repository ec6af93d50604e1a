"""Run under torchrun with 2 processes: pushes against engines that fail. Usage: sync_failures.py JOBS RESULTS MODEL_DIR

JOBS: JSON list of {name, urls, transport, timeout_s}; with two engines the second
one is on node 1, as rank 1 is. RESULTS: {name: [{error, seconds} of each rank]}. Both ranks send,
and the export stream is collective: a rank that stopped reading it after an error would hold up the other one.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrl.config.schema import SyncConfig
from mrl.parallel import Nodes
from mrl.weights.errors import SyncError
from mrl.weights.sync.payload import Bucket, plan_buckets
from mrl.weights.sync.push import WeightSync
from tests.sync_tools import FileExporter


class SmallBuckets(WeightSync):
    """Small enough for several a rank."""

    def _plan(self, sender: int) -> tuple[Bucket, ...]:
        return plan_buckets([meta for meta in self._metas if meta.sender == sender], 1 << 16)


def push(job: dict[str, Any], exporter: FileExporter) -> dict[str, Any]:
    cfg = SyncConfig(transport=job["transport"], timeout_s=job["timeout_s"])
    urls = job["urls"]
    homes = {url: node for node, url in enumerate(urls)} if len(urls) > 1 else None
    sync = SmallBuckets(exporter, urls, cfg, nodes=Nodes((0, 1), exporter.rank), homes=homes)
    started = time.monotonic()
    error = ""
    try:
        sync.push("7")
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
