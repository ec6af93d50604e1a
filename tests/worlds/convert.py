"""Run under torchrun: conversions of tiny models by all ranks together, and loads of the results under many layouts.

Usage: convert.py JOB_FILE RESULT_FILE. The job file is a JSON list of {check, model, layout, out, dtype} as in
weights.py, with the same models and references. Rank 0 writes the list of results.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrl import platform

platform.install()

from megatron.core import dist_checkpointing  # noqa: E402
from weights import Job, error_of, everywhere, logits, run_checks  # noqa: E402

from mrl import checkpoint  # noqa: E402
from mrl.config.schema import CheckpointConfig, TrainConfig  # noqa: E402
from mrl.learner import Learner  # noqa: E402
from mrl.parallel import Meshes, rank  # noqa: E402
from mrl.weights.convert.convert import ConvertOptions, hf_to_megatron, megatron_to_hf  # noqa: E402
from mrl.weights.disk.megatron_dirs import open_megatron  # noqa: E402
from mrl.weights.disk.safetensors_io import HFCheckpoint  # noqa: E402
from mrl.weights.model.export import Exporter, save_hf  # noqa: E402
from mrl.weights.model.load import load_hf, load_pretrained  # noqa: E402
from mrl.weights.model.names import named_parameters  # noqa: E402

SMALL = ConvertOptions(bucket_bytes=5_000, max_file_bytes=100_000)  # many blocks, some of which split a parameter
State = dict[str, torch.Tensor]


class ConvertedJob(Job):
    """A job that loads its models from the converted directory."""

    def __init__(self, spec: dict[str, Any], meshes: Meshes) -> None:
        super().__init__(spec, meshes)
        self.meshes, self.converted = meshes, Path(spec["converted"])

    def load(self, role: str = "policy", path: Path | None = None) -> list[Any]:
        chunks = self.build(role)
        load_pretrained(chunks, self.arch, path or self.converted, self.mesh, role=role)  # type: ignore[arg-type]
        return chunks


def state_of(chunks: list[Any]) -> State:
    return {name: parameter.detach().clone() for name, parameter in named_parameters(chunks)}


def different(a: State, b: State) -> list[str]:
    """Returns the names of tensors that are not bitwise equal on some rank."""
    mine = sorted(a.keys() ^ b.keys()) + [name for name in a.keys() & b.keys() if not torch.equal(a[name], b[name])]
    return sorted({name for names in everywhere(mine) for name in names})


def convert(job: ConvertedJob) -> dict[str, Any]:
    """Converts the model with every rank writing a part. Later jobs load the result."""
    report = hf_to_megatron(job.path, job.converted, SMALL, job.meshes)
    files = sorted(str(path.relative_to(job.converted)) for path in job.converted.rglob("*") if path.is_file())
    return {"bytes": report.nbytes, "files": files}


def load(job: ConvertedJob) -> dict[str, Any]:
    """Loads the converted model by the trainer and by Megatron, and compares both with `load_hf`."""
    reference = job.build()
    load_hf(reference, job.arch, job.path, job.mesh)
    want = state_of(reference)
    theirs = job.build()
    with job.mesh.active():
        wanted = {
            f"model{i}": chunk.sharded_state_dict(metadata={"dp_cp_group": job.mesh.dp_cp_group})
            for i, chunk in enumerate(theirs)
        }
        with open_megatron(job.converted) as model:
            loaded = dist_checkpointing.load(wanted, str(model.weights))
        for i, chunk in enumerate(theirs):
            chunk.load_state_dict(loaded[f"model{i}"])
    ours = different(state_of(job.load()), want)
    return {"trainer": ours, "megatron": different(state_of(theirs), want), "parameters": len(want)}


def back(job: ConvertedJob) -> dict[str, Any]:
    """Converts back on all ranks, and compares the files with the original ones."""
    megatron_to_hf(job.converted, job.out, SMALL, job.meshes)
    with HFCheckpoint(job.path) as one, HFCheckpoint(job.out) as two:
        wrong = sorted(set(one) ^ set(two))
        wrong += [name for name in one if not torch.equal(one.source(name)[:], two.source(name)[:])]
    return {"wrong": wrong, "files": sorted(path.name for path in job.out.iterdir())}


def critic(job: ConvertedJob) -> dict[str, Any]:
    """Loads a critic from a converted policy. Then converts a trained critic to Megatron and back."""
    started = job.load("critic")
    reference = job.build("critic")
    load_hf(reference, job.arch, job.path, job.mesh, role="critic")
    from_policy = different(state_of(started), state_of(reference))
    for name, parameter in named_parameters(started):
        if name == "value_head.weight":
            parameter.data.copy_(torch.arange(parameter.numel()).view_as(parameter))
    trained = state_of(started)
    hf, megatron, again = (job.out / name for name in ("hf", "megatron", "again"))
    if rank() == 0:
        job.out.mkdir()
    dist.barrier()
    save_hf(Exporter(started, job.arch, job.mesh), job.path, hf, max_file_bytes=100_000)
    role = hf_to_megatron(hf, megatron, SMALL, job.meshes).role
    converted = different(state_of(job.load("critic", megatron)), trained)
    megatron_to_hf(megatron, again, SMALL, job.meshes)
    returned = different(state_of(job.load("critic", again)), trained)
    as_policy = error_of(lambda: job.load("policy", megatron))
    return {
        "from_policy": from_policy,
        "role": role,
        "converted": converted,
        "returned": returned,
        "as_policy": as_policy,
    }


def run_checkpoint(job: ConvertedJob) -> dict[str, Any]:
    """Exports actor and critic of a run's checkpoint by name; both were split over all ranks."""
    run = job.out / "run"
    train = TrainConfig(parallel=job.mesh.cfg)
    learners = {
        name: Learner(role, job.arch, str(job.path), train, job.mesh, dtype=job.dtype, seed=3, from_scratch=True)  # type: ignore[arg-type]
        for name, role in (("actor", "policy"), ("critic", "critic"))
    }
    if rank() == 0:
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(f"model:\n  path: {job.path}\ncritic: {{}}\n")
    dist.barrier()
    saver = checkpoint.Saver(run, CheckpointConfig(every_steps=1), lambda written: None)
    saver.save(1, learners, {"step": 1})
    saver.wait(60)
    step = run / "checkpoints" / "step_1"
    wrong = {}
    for name, learner in learners.items():
        target, want = job.out / name, job.out / f"{name}_want"
        options = ConvertOptions(part=name, bucket_bytes=5_000)
        megatron_to_hf(step, target, options, job.meshes)
        save_hf(learner.exporter, job.path, want)
        with HFCheckpoint(want) as one, HFCheckpoint(target) as two:
            wrong[name] = sorted(set(one) ^ set(two))
            wrong[name] += [key for key in one if not torch.equal(one.source(key)[:], two.source(key)[:])]
    other = error_of(lambda: megatron_to_hf(step, job.out / "none", ConvertOptions(part="reward"), job.meshes))
    shutil.copytree(step / "actor", job.out / "bare", dirs_exist_ok=True) if rank() == 0 else None
    dist.barrier()
    bare = error_of(lambda: megatron_to_hf(job.out / "bare", job.out / "none", ConvertOptions(), job.meshes))
    named = ConvertOptions(model_files=job.path)
    megatron_to_hf(job.out / "bare", job.out / "from_bare", named, job.meshes)
    same = (job.out / "from_bare" / "model.safetensors").read_bytes() == (
        job.out / "actor" / "model.safetensors"
    ).read_bytes()
    return {"wrong": wrong, "other": other, "bare": bare, "same": same}


CHECKS: dict[str, Callable[[Any], Any]] = {
    "convert": convert,
    "load": load,
    "logits": logits,
    "back": back,
    "critic": critic,
    "run_checkpoint": run_checkpoint,
}


if __name__ == "__main__":
    run_checks(CHECKS, ConvertedJob)
