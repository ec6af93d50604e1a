"""Run under torchrun: weight syncs of real Megatron models to a running engine.

Usage: sync.py MODEL_DIR OLD_MODEL_DIR URL JOBS RESULTS. JOBS: JSON list of {layout, transport}. Before each sync the
engine loads OLD_MODEL_DIR from disk; RESULTS has the engine's checksums before and after, and the report.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrl import platform

platform.install()

from mrl.config.schema import ParallelConfig, SyncConfig, TrainConfig  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.inference.access import Access  # noqa: E402
from mrl.inference.client import EngineClient  # noqa: E402
from mrl.models.build import build_model  # noqa: E402
from mrl.parallel import Meshes, rank  # noqa: E402
from mrl.weights.model.export import Exporter  # noqa: E402
from mrl.weights.model.load import load_hf  # noqa: E402
from mrl.weights.sync.weight_sync import WeightSync  # noqa: E402

MODEL, OLD, URL, JOBS, RESULTS = sys.argv[1:6]


def exporter(layout: dict[str, int], meshes: Meshes) -> Exporter:
    arch, cfg = load_arch(MODEL), ParallelConfig(**layout)
    mesh = meshes.get(cfg)
    with mesh.active():
        chunks = build_model(arch, MODEL, TrainConfig(parallel=cfg), mesh, torch.float32, "policy", seed=3)
        load_hf(chunks, arch, MODEL, mesh, role="policy")
        return Exporter(chunks, arch, mesh)


def hashes(client: EngineClient) -> dict[str, str]:
    return {f"{r.tp_rank} {name}": digest for r in client.weights_checksum() for name, digest in r.checksums.items()}


def main() -> None:
    platform.init_process_group(120.0)
    asked = json.loads(Path(JOBS).read_text())
    access = Access(asked["api_key"])
    client = EngineClient(URL, 60.0, access)
    meshes, results = Meshes(), []
    for job in asked["jobs"]:
        result: dict[str, Any] = {}
        if rank() == 0:
            client.update_weights_from_disk(OLD, weight_version="old")
            result["before"] = hashes(client)
        dist.barrier()
        cfg = SyncConfig(transport=job["transport"], verify="checksum", timeout_s=60.0, bucket_mib=1)
        sync = WeightSync(exporter(job["layout"], meshes), [URL], cfg, access=access)
        report = sync.update_weights("1")
        result |= {"verified": report.verified, "tensors": report.tensors, "seconds": report.seconds}
        if rank() == 0:
            result["after"] = hashes(client)
        dist.barrier()
        sync.close()
        results.append(result)
    if rank() == 0:
        Path(RESULTS).write_text(json.dumps(results))
    dist.destroy_process_group()


main()
