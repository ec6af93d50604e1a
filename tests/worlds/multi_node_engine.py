"""Four ranks, each on its own node, and two engines over two nodes each. Usage: multi_node_engine.py MODEL_DIR URL URL

Ranks 1 and 2 send. The first sync is for both engines, the next for the second engine alone, as after its restart.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from mrl.config.schema import SyncConfig
from mrl.parallel import Nodes
from mrl.weights.sync.payload import Bucket, plan_buckets
from mrl.weights.sync.weight_sync import WeightSync
from tests.helpers.sync_tools import FileExporter


class SmallBuckets(WeightSync):
    """A sync with buckets small enough for several per rank."""

    def _plan(self, sender: int) -> tuple[Bucket, ...]:
        return plan_buckets([meta for meta in self._metas if meta.sender == sender], 1 << 16)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model, *urls = sys.argv[1:]
    rank = dist.get_rank()
    exporter = FileExporter(Path(model), rank, lambda name: 2 if ".layers.1." in name or "lm_head" in name else 1)
    exporter.gather = dist.barrier
    homes = {urls[0]: (0, 1), urls[1]: (2, 3)}
    sync = SmallBuckets(exporter, urls, SyncConfig(timeout_s=30.0), 4, nodes=Nodes((0, 1, 2, 3), rank), homes=homes)
    sync.update_weights("7")
    with sync._engines.only(urls[1]):
        sync.update_weights("8")
    sync.close()
    dist.destroy_process_group()


main()
