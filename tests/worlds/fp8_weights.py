"""Run under torchrun: a model whose layers' matrices are in fp8 (fake_fp8.py) is loaded, trained, synced to a running
engine, saved and resumed.

Usage: fp8_weights.py WORK_DIR MODEL_DIR ENGINE_JSON RESULT_JSON LAYOUT [LAYOUT ...]. ENGINE_JSON: {url, api_key}.
RESULT_JSON gets {layout: {check: true if it holds, or the measured values}}.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from mrl import platform

platform.install()

from checkpoint_tools import save, train, weights_of  # noqa: E402
from gradients import parse  # noqa: E402

from mrl import checkpoint  # noqa: E402
from mrl.config.schema import OptimizerConfig, SyncConfig, TrainConfig  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.inference.access import Access  # noqa: E402
from mrl.inference.client import EngineClient  # noqa: E402
from mrl.learner import Learner, learner  # noqa: E402
from mrl.models.build import build_model  # noqa: E402
from mrl.models.initialise import initialise  # noqa: E402
from mrl.parallel import Meshes, rank  # noqa: E402
from mrl.weights.sync.weight_sync import WeightSync  # noqa: E402
from tests.helpers import fake_fp8  # noqa: E402


def in_fp8(*args: Any, **kwargs: Any) -> Any:
    chunks = build_model(*args, **kwargs)
    for chunk in chunks:
        fake_fp8.into_fp8(chunk)
        chunk.config.fp8_param = True
    return chunks


def learner_of(meshes: Meshes, model: str, layout: str, *, fp8: bool = True) -> Learner:
    learner.build_model = in_fp8 if fp8 else build_model
    mesh = meshes.get(parse(layout))
    settings = TrainConfig(parallel=mesh.cfg, optimizer=OptimizerConfig(lr=2e-3), max_tokens_per_microbatch=128)
    return Learner("policy", load_arch(model), model, settings, mesh, dtype=torch.bfloat16, seed=3)


def mains(made: Learner) -> dict[str, torch.Tensor]:
    names = {parameter: name for chunk in made.bare for name, parameter in chunk.named_parameters()}
    return {names[parameter]: main.clone() for parameter, main in made.main_weights()}  # type: ignore[index]


def rounding(weights: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the relative error of each tensor that differs."""
    errors = {name: float((w - exact[name]).float().norm() / exact[name].float().norm()) for name, w in weights.items()}
    return {name: error for name, error in errors.items() if error}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def is_drawn(meshes: Meshes, model: str, layout: str) -> bool:
    """Returns True if random fp8 weights keep the high-precision values from which main weights start."""
    mesh, arch = meshes.get(parse(layout)), load_arch(model)
    train = TrainConfig(parallel=mesh.cfg)
    with mesh.active():
        (chunk,) = build_model(arch, model, train, mesh, torch.bfloat16, "policy", 3)
        drawn = [parameter.detach().clone() for parameter in chunk.parameters()]
        fake_fp8.into_fp8(chunk)
        for parameter in chunk.parameters():
            parameter.data.copy_(torch.zeros(parameter.shape))
        initialise(chunk, arch, mesh, "policy", 3)
    given = [vars(parameter).get("_initial", parameter) for parameter in chunk.parameters()]
    return all(map(torch.equal, given, drawn))


def look(meshes: Meshes, work: Path, model: str, engine: dict[str, str], layout: str) -> dict[str, Any]:
    made, plain = learner_of(meshes, model, layout), learner_of(meshes, model, layout, fp8=False)
    found: dict[str, Any] = {"drawn": is_drawn(meshes, model, layout), "mains": same(mains(made), mains(plain))}
    found["rounding"] = rounding(weights_of({"actor": made}), weights_of({"actor": plain}))
    found["hashes"] = [push(made, engine)]
    train({"actor": made}, range(1))
    trained = weights_of({"actor": made})
    found["hashes"] += [push(made, engine)]
    saved = save(work / layout, 1, {"actor": made}, {}, keep_last=1)
    checkpoint.load(saved, {"actor": plain})
    found["saved"] = same(weights_of({"actor": plain}), trained)
    found["hashes"] += [push(plain, engine)]
    again = learner_of(meshes, model, layout)
    checkpoint.load(saved, {"actor": again})
    found["loaded"] = same(weights_of({"actor": again}), trained) and same(mains(again), mains(made))
    for one in (made, again):
        train({"actor": one}, range(1, 3))
    ends = weights_of({"actor": again}), weights_of({"actor": made})
    found["resumed"] = same(*ends) and same(mains(again), mains(made))
    return found


def push(made: Learner, engine: dict[str, str]) -> list[str]:
    """Syncs the weights with verification and returns the checksums that the engine reports."""
    access = Access(engine["api_key"])
    cfg = SyncConfig(transport="http", verify="checksum", timeout_s=60.0, bucket_mib=1)
    with closing(WeightSync(made.exporter, [engine["url"]], cfg, access=access)) as sync:
        report = sync.update_weights("1")
    assert report.verified == report.tensors > 0
    if rank() != 0:
        return []
    held = EngineClient(engine["url"], 60.0, access).weights_checksum()
    return [digest for one in held for _, digest in sorted(one.checksums.items())]


def main() -> None:
    work, model, engine, result, *layouts = sys.argv[1:]
    fake_fp8.tell_megatron()
    platform.init_process_group(120)
    meshes = Meshes(120)
    found = {name: look(meshes, Path(work), model, json.loads(Path(engine).read_text()), name) for name in layouts}
    if rank() == 0:
        Path(result).write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
