"""Run under torchrun with 2 processes, both senders: repeated weight syncs by broadcast to several engines.

Usage: sync_many.py URLS KEY MODEL_DIR RESULTS. The engines are four `tests.helpers.receiving_engine`s. RESULTS: {step:
{error, seconds, and each engine's state}}; each step sends other weights.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import torch.distributed as dist

from mrl.config.schema import SyncConfig
from mrl.inference.access import Access
from mrl.weights.errors import SyncError
from mrl.weights.sync.payload import Bucket, plan_buckets
from mrl.weights.sync.weight_sync import WeightSync
from tests.helpers.receiving_engine import digest
from tests.helpers.sync_tools import FileExporter


class SmallBuckets(WeightSync):
    """A sync with buckets small enough for several per rank."""

    def _plan(self, sender: int) -> tuple[Bucket, ...]:
        return plan_buckets([meta for meta in self._metas if meta.sender == sender], 1 << 16)


URLS, KEY, RESULTS = sys.argv[1].split(), sys.argv[2], Path(sys.argv[4])
TIMEOUT_S = 30.0


def ask(url: str, path: str, **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(f"{url}/{path}", json=body, headers=headers, trust_env=False, timeout=60).json()


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    exporter = FileExporter(Path(sys.argv[3]), rank, lambda name: int(".layers.1." in name or "lm_head" in name))
    exporter.gather = dist.barrier
    sync = SmallBuckets(
        exporter, URLS[:3], SyncConfig(transport="distributed", timeout_s=TIMEOUT_S), 1, access=Access(KEY)
    )
    results: dict[str, Any] = {"buckets": sum(len(sync._plan(sender)) for sender in (0, 1))}

    def step(name: str, update: Callable[[], object], dead: Sequence[str] = ()) -> None:
        for tensor in exporter.tensors.values():
            tensor.add_(1)
        error, began = "", time.monotonic()
        try:
            update()
        except SyncError as caught:
            error = str(caught)
        row = {"error": error, "seconds": time.monotonic() - began, "sent": digest(exporter.tensors)}
        if rank == 0:
            results[name] = row | {url: ask(url, "state") for url in URLS if url not in dead}
        dist.barrier()

    def behave(url: str, behaviour: str) -> None:
        if rank == 0:
            ask(url, "behave", behaviour=behaviour)
        dist.barrier()

    def everybody() -> None:
        sync.update_weights("1")

    def one(url: str) -> None:
        """Syncs one engine as `resync` does, unverified: these engines have no parameters for checksums."""
        with sync._engines.only(url):
            sync._timed(verify=False, again=True)

    first, second, third, fourth = URLS
    step("first", everybody)
    step("same group", everybody)
    behave(second, "refuses")
    step("refuses", everybody)
    step("after it", everybody)
    behave(first, "new")
    sync.mark_restarted([first])
    step("one alone", lambda: one(first))
    step("all again", everybody)
    sync.set_engines(URLS)
    step("one more", everybody)
    behave(third, "dies")
    step("dies", everybody, dead=[third])
    sync.set_engines([first, second, fourth])
    step("without it", everybody, dead=[third])
    sync.close()
    if rank == 0:
        RESULTS.write_text(json.dumps(results))
    dist.destroy_process_group()


main()
