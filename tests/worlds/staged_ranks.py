"""Run by forked.py: what ranks that share one device compute, with collectives staged through host memory.

Usage: staged_ranks.py WORK CASE... Each CASE writes WORK/CASE.pt:
MODEL:LAYOUT:PRECISION: the loss, every gradient, and the weights after an update; MODEL is a directory in WORK
save:LAYOUT: the weights after four updates, with a checkpoint after two
resume:LAYOUT: the weights after two updates from that checkpoint, and those before it was loaded
sync:LAYOUT:TRANSPORT: the report of a weight sync after two updates, to the engine that WORK/engine.json names
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mrl import platform

platform.install()

from checkpoint_tools import save, train, weights_of  # noqa: E402
from gradients import everywhere, make_rollout, parse  # noqa: E402

from mrl import checkpoint  # noqa: E402
from mrl.config.schema import FP8Config, OptimizerConfig, PrecisionConfig, SyncConfig, TrainConfig  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.inference.access import Access  # noqa: E402
from mrl.learner import Learner, losses  # noqa: E402
from mrl.parallel import Meshes, rank  # noqa: E402
from mrl.weights.sync.weight_sync import WeightSync  # noqa: E402
from tools.gpu import staged_collectives  # noqa: E402

TIMEOUT_S = 120
# with its usual eps Adam makes a whole step of a gradient that is rounding alone
SMOOTH = OptimizerConfig(lr=1e-2, eps=1e-3)


def learner_of(work: Path, meshes: Meshes, model: str, layout: str, precision: str, seed: int = 1) -> Learner:
    mesh, on_gpu, fp8 = meshes.get(parse(layout)), platform.device().type == "cuda", FP8Config()
    if precision not in ("float32", "bfloat16"):
        fp8 = FP8Config(recipe=precision, emulate=not on_gpu)  # type: ignore[arg-type]
    settings = TrainConfig(
        parallel=mesh.cfg,
        layers="transformer_engine" if on_gpu and precision != "float32" else "local",
        optimizer=SMOOTH,
        max_tokens_per_microbatch=56 if fp8.recipe == "none" else 256,
        precision=PrecisionConfig(fp8=fp8),
    )
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    directory = str(work / model)
    return Learner("policy", load_arch(directory), directory, settings, mesh, dtype=dtype, seed=seed)


def measured(learner: Learner) -> dict[str, Any]:
    rollout = make_rollout(learner.arch.vocab_size)
    loss = losses.cross_entropy(torch.full((rollout.num_response_tokens,), 1 / rollout.num_response_tokens))
    found = learner.backward(rollout, range(rollout.num_samples), loss, 1.0, full_gradients=True)
    gradients = everywhere(learner, lambda parameter: parameter.main_grad)
    learner.step()
    return {"loss": found["loss"], "gradients": gradients, "weights": weights_of({"actor": learner})}


def saved(work: Path, meshes: Meshes, layout: str) -> dict[str, Any]:
    learners = {"actor": learner_of(work, meshes, "dense", layout, "float32")}
    train(learners, range(2))
    save(work / "run", 2, learners, {}, keep_last=1)
    train(learners, range(2, 4))
    return {"weights": weights_of(learners)}


def resumed(work: Path, meshes: Meshes, layout: str) -> dict[str, Any]:
    learners = {"actor": learner_of(work, meshes, "dense", layout, "float32", seed=9)}
    before = weights_of(learners)
    checkpoint.load(work / "run" / "checkpoints" / "step_2", learners)
    train(learners, range(2, 4))
    return {"weights": weights_of(learners), "before": before}


def synced(work: Path, meshes: Meshes, layout: str, transport: str) -> dict[str, Any]:
    learner = learner_of(work, meshes, "dense", layout, "bfloat16")
    train({"actor": learner}, range(2))
    engine = json.loads((work / "engine.json").read_text())
    cfg = SyncConfig(transport=transport, verify="checksum", bucket_mib=1, timeout_s=60.0)  # type: ignore[arg-type]
    with closing(WeightSync(learner.exporter, [engine["url"]], cfg, access=Access(engine["key"]))) as sync:
        return asdict(sync.update_weights("1"))


def main() -> None:
    work = Path(sys.argv[1])
    staged_collectives.install()
    platform.use_device()
    platform.init_process_group(TIMEOUT_S, "gloo")
    meshes = Meshes(TIMEOUT_S)
    for case in sys.argv[2:]:
        kind, *words = case.split(":")
        if kind == "save":
            found = saved(work, meshes, *words)
        elif kind == "resume":
            found = resumed(work, meshes, *words)
        elif kind == "sync":
            found = synced(work, meshes, *words)
        else:
            found = measured(learner_of(work, meshes, kind, *words))
        if rank() == 0:
            torch.save(found, work / f"{case}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
