"""Run under torchrun with 2 processes: pushes against engines that fail. Usage: sync_failures.py JOBS RESULTS MODEL_DIR

JOBS: JSON list of {name, url, transport, timeout_s}. RESULTS: {name: [{error, seconds} of each rank]}. Both ranks send,
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
from mrl.weights.errors import SyncError
from mrl.weights.sync.payload import plan_buckets
from mrl.weights.sync.push import WeightSync
from tests.sync_tools import FileExporter


def push(job: dict[str, Any], exporter: FileExporter) -> dict[str, Any]:
    cfg = SyncConfig(transport=job["transport"], timeout_s=job["timeout_s"])
    sync = WeightSync(exporter, [job["url"]], cfg)
    mine = [meta for meta in exporter.metas() if meta.sender == exporter.rank]
    sync._buckets = plan_buckets(mine, 1 << 16)  # small enough for several a rank
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
