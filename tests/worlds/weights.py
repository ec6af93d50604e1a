"""Run under torchrun: weights and logits of many tiny models under many layouts.

Usage: weights.py JOB_FILE RESULT_FILE. The job file is a JSON list of {check, model, layout, out, dtype}. Rank 0 writes
the list of results: for each job the return value of the check of that name. Each model directory holds `reference.pt`:
tokens, position_ids, cu_seqlens, max_seqlen, logits [t, vocab] from transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mrl import platform

platform.install()

from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from mrl.config.schema import ParallelConfig, TrainConfig  # noqa: E402
from mrl.core import PackedBatch  # noqa: E402
from mrl.families import ModelArch, load_arch  # noqa: E402
from mrl.families.table import OUTPUT  # noqa: E402
from mrl.models.batch import ModelBatch  # noqa: E402
from mrl.models.build import build_model  # noqa: E402
from mrl.parallel import Mesh, Meshes, rank, world_size  # noqa: E402
from mrl.weights.disk.safetensors_io import HFCheckpoint  # noqa: E402
from mrl.weights.errors import WeightError  # noqa: E402
from mrl.weights.model import export, load  # noqa: E402
from mrl.weights.model.export import Exporter, save_hf  # noqa: E402
from mrl.weights.model.load import load_hf  # noqa: E402


class Wrapper(nn.Module):
    """The outside of Megatron's data-parallel wrapper."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Job:
    def __init__(self, spec: dict[str, Any], meshes: Meshes) -> None:
        self.path, self.out = Path(spec["model"]), Path(spec.get("out", "/nonexistent"))
        self.mesh: Mesh = meshes.get(ParallelConfig(**spec["layout"]))
        self.arch = load_arch(self.path)
        self.dtype: torch.dtype = getattr(torch, spec.get("dtype", "float32"))

    def build(self, role: str = "policy", arch: ModelArch | None = None) -> list[Any]:
        train = TrainConfig(parallel=self.mesh.cfg)
        with self.mesh.active():
            return build_model(arch or self.arch, str(self.path), train, self.mesh, self.dtype, role, seed=1)  # type: ignore[arg-type]

    def load(self, role: str = "policy", path: Path | None = None) -> list[Any]:
        chunks = self.build(role)
        load_hf(chunks, self.arch, path or self.path, self.mesh, role=role)  # type: ignore[arg-type]
        return chunks


def everywhere(value: Any) -> list[Any]:
    box = [None] * world_size()
    dist.all_gather_object(box, value)
    return box


def streamed(chunks: list[Any], arch: ModelArch, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Returns the tensors that this rank sends, checked against their metas."""
    exporter = Exporter(chunks, arch, mesh)
    metas = exporter.metas()
    assert all(other == metas for other in everywhere(metas))
    mine = [meta for meta in metas if meta.sender == rank()]
    tensors = {}
    for meta, (name, tensor) in zip(mine, exporter.stream(), strict=True):
        assert (name, tuple(tensor.shape), tensor.dtype) == (meta.name, meta.shape, meta.dtype)
        assert tensor.is_contiguous() and not tensor.requires_grad
        tensors[name] = tensor
    return tensors


def wrong_tensors(job: Job, chunks: list[Any], extra: tuple[str, ...] = (), skip: tuple[str, ...] = ()) -> list[str]:
    """Returns names that are missing, superfluous, sent twice or not bitwise equal to the checkpoint (in the model's
    dtype)."""
    wrong = []
    tensors = streamed(chunks, job.arch, job.mesh)
    with HFCheckpoint(job.path) as checkpoint:
        for name, tensor in tensors.items():
            if name in checkpoint and not torch.equal(tensor, checkpoint.source(name)[:].to(job.dtype)):
                wrong.append(f"{name} differs")
        wanted = sorted((set(checkpoint) | set(extra)) - set(skip))
    sent = sorted(name for names in everywhere(list(tensors)) for name in names)
    return (
        [text for texts in everywhere(wrong) for text in texts]
        + sorted(set(sent) ^ set(wanted))
        + ([] if sent == wanted else ["sent != wanted"])
    )


def round_trip(job: Job) -> list[str]:
    chunks = job.build()
    load_hf([Wrapper(Wrapper(chunk)) for chunk in chunks], job.arch, job.path, job.mesh)
    return wrong_tensors(job, chunks)


def from_fused_experts(job: Job) -> list[str]:
    """Loads from the directory in transformers' own layout, and compares the export with the hub's layout."""
    return wrong_tensors(job, job.load(path=job.path / "fused"))


def padding_is_zero(job: Job) -> float:
    """Returns the largest absolute value in the vocabulary's padding; -1 without padding."""
    worst = -1.0
    for name, parameter in load.named_parameters(job.load()):
        if "embeddings" in name or name == OUTPUT:
            past = parameter[max(0, job.arch.vocab_size - job.mesh.tp_rank * parameter.shape[0]) :]
            worst = max(worst, float(past.abs().max())) if past.numel() else worst
    return max(everywhere(worst))


def logits(job: Job) -> dict[str, float]:
    """Returns max |difference| from transformers' logits, and the largest |logit|, over packed sequences."""
    chunks, mesh = job.load(), job.mesh
    reference = torch.load(job.path / "reference.pt")
    tokens, want = reference["tokens"], reference["logits"]
    every = torch.arange(tokens.numel())
    batch = PackedBatch(
        tokens=tokens, position_ids=reference["position_ids"], output_positions=every, labels=tokens[0],
        response_indices=every,
        cu_seqlens=reference["cu_seqlens"], max_seqlen=reference["max_seqlen"],
    )  # fmt: skip
    got: list[torch.Tensor] = []

    def step(it: Iterator[PackedBatch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        made = ModelBatch.make(next(it), mesh, 1.0, "logits")

        def collect(output: torch.Tensor, non_loss_data: bool = True) -> None:
            parts = [torch.empty_like(output) for _ in range(mesh.tp)]
            dist.all_gather(parts, output.contiguous(), group=mesh.tp_group)
            got.append(torch.cat(parts, -1)[:, : job.arch.vocab_size])

        return model(batch.tokens, batch.position_ids, None, packed_seq_params=made), collect

    count = mesh.pp if mesh.vpp else 1
    with torch.no_grad(), mesh.active():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter([batch] * count) for _ in chunks] if mesh.vpp else iter([batch]),
            model=chunks if mesh.vpp else chunks[0],
            num_microbatches=count,
            seq_length=1,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    errors = [float((out - want).abs().max()) for out in got] or [-1.0]
    return {"error": max(everywhere(max(errors))), "scale": float(want.abs().max())}


def save(job: Job) -> None:
    """Writes a directory for transformers to read. The parameters are in one flat buffer, as with data parallelism."""
    chunks = job.load()
    for chunk in chunks:
        flat = torch.cat([parameter.detach().flatten() for parameter in chunk.parameters()])
        for parameter, part in zip(
            chunk.parameters(), flat.split([p.numel() for p in chunk.parameters()]), strict=True
        ):
            parameter.data = part.view_as(parameter)
    save_hf(Exporter(chunks, job.arch, job.mesh), job.path, job.out, max_file_bytes=100_000)


def save_errors(job: Job) -> dict[str, Any]:
    """Saves with a full disk on the last sender only, to a destination that exists, and then overwrites it."""
    exporter = Exporter(job.load(), job.arch, job.mesh)
    last = max(meta.sender for meta in exporter.metas())
    original, calls = export.save_file, []

    def full_disk(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        raise OSError("No space left on device")

    if rank() == last:
        export.save_file = full_disk
    disk = error_of(lambda: save_hf(exporter, job.path, job.out, max_file_bytes=20_000))
    export.save_file = original
    untouched = not job.out.exists()
    dist.barrier()
    save_hf(exporter, job.path, job.out)
    taken = error_of(lambda: save_hf(exporter, job.path, job.out))
    save_hf(exporter, job.path, job.out, overwrite=True, max_file_bytes=20_000)
    left = sorted(path.name for path in job.out.parent.iterdir() if path.name.startswith(f".{job.out.name}"))
    files = [path.name for path in job.out.glob("*.safetensors")]
    return {
        "disk": disk,
        "tries": max(everywhere(len(calls))),
        "untouched": untouched,
        "taken": taken,
        "left": left,
        "files": files,
    }


def error_of(do: Callable[[], Any]) -> str:
    """Returns the WeightError, which every rank must raise in the same words."""
    text = "no error"
    try:
        do()
    except WeightError as e:
        text = str(e)
    texts = everywhere(text)
    return text if len(set(texts)) == 1 else f"ranks disagree: {texts}"


def critic(job: Job) -> dict[str, Any]:
    """Loads a critic from a policy checkpoint, and then from its own export with another value head."""
    chunks = job.load("critic")
    heads = [p for name, p in load.named_parameters(chunks) if name == "value_head.weight"]
    fresh = max(everywhere(max((float(p.detach().abs().max()) for p in heads), default=-1.0)))
    bias = ("score.bias",) if job.arch.family in ("qwen2", "qwen3") else ()  # SGLang's classes need it
    wrong = wrong_tensors(job, chunks, extra=("score.weight", *bias), skip=("lm_head.weight",))
    for head in heads:
        head.data.copy_(torch.arange(head.numel()).view_as(head))
    save_hf(Exporter(chunks, job.arch, job.mesh), job.path, job.out, max_file_bytes=100_000)
    sent = streamed(job.load("critic", path=job.out), job.arch, job.mesh)
    head_back = [sent["score.weight"].flatten().tolist()] if "score.weight" in sent else []
    back = [value for values in everywhere(head_back) for value in values]
    as_policy = error_of(lambda: job.load("policy", path=job.out))
    return {"fresh": fresh, "wrong": wrong, "head_back": back == [list(range(job.arch.hidden_size))],
            "as_policy": as_policy}  # fmt: skip


def load_errors(job: Job) -> dict[str, str]:
    """Loads a checkpoint with a missing, a superfluous and a misshapen tensor; then loads into too small a model."""
    if rank() == 0:
        job.out.mkdir()
        tensors = load_file(job.path / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.zeros(5)
        save_file(tensors, job.out / "model.safetensors")
    dist.barrier()
    leftovers = error_of(lambda: job.load(path=job.out))
    deeper = replace(job.arch, layers=(*job.arch.layers, job.arch.layers[0]))
    small = job.build()
    too_small = error_of(lambda: load_hf(small, deeper, job.path, job.mesh))
    missing = error_of(lambda: job.load(path=job.out / "nowhere"))
    whole = {"leftovers": leftovers, "too_small": too_small, "missing": missing}
    return whole | {name: error_of(partial(job.load, path=changed(job, name, change))) for name, change in BAD.items()}


def changed(job: Job, name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Returns a copy of the job's model directory with changed tensors."""
    path = job.out / name
    if rank() == 0:
        path.mkdir()
        tensors = load_file(job.path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")
    dist.barrier()
    return path


def set_value(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors[name].view(-1)[-3:-2].fill_(value)


BAD: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "tied_twice": lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    "untied": lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1e-3}),
    "inv_freq": lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    "nan": set_value("model.layers.1.self_attn.k_proj.weight", float("nan")),
    "infinity": set_value("model.embed_tokens.weight", float("-inf")),
}


def tied_copy_forgotten(job: Job) -> str:
    """Imitates a loader that writes only the first stage's embedding, and returns the error of the load."""
    original = load._fill

    def forgetful(item: load.ParameterLoad, *args: Any) -> None:
        if item.name != OUTPUT:
            original(item, *args)

    load._fill = forgetful
    try:
        return error_of(job.load)
    finally:
        load._fill = original


def attributes(job: Job) -> list[str]:
    """Returns the parameters whose tensor-parallel attributes the load does not restore after they were removed. They
    are missing without Megatron's own initialization."""
    chunks = job.build()
    marked = {}
    for name, parameter in load.named_parameters(chunks):
        marked[name] = (vars(parameter).get("tensor_model_parallel", False), vars(parameter).get("partition_dim", -1))
        vars(parameter).clear()
    load_hf(chunks, job.arch, job.path, job.mesh)
    return [
        name
        for name, parameter in load.named_parameters(chunks)
        if (vars(parameter).get("tensor_model_parallel", False), vars(parameter).get("partition_dim", -1))
        != marked[name]
    ]


CHECKS: dict[str, Callable[[Job], Any]] = {
    "round_trip": round_trip,
    "from_fused_experts": from_fused_experts,
    "padding_is_zero": padding_is_zero,
    "logits": logits,
    "save": save,
    "save_errors": save_errors,
    "critic": critic,
    "load_errors": load_errors,
    "tied_copy_forgotten": tied_copy_forgotten,
    "attributes": attributes,
}


def run_checks(checks: Mapping[str, Callable[[Any], Any]], make: Callable[[dict[str, Any], Meshes], Any]) -> None:
    """Runs `check` of each job in the file argv[1] on the result of `make`, and writes the results to argv[2]."""
    job_file, result_file = map(Path, sys.argv[1:])
    platform.init_process_group(60)
    meshes = Meshes(60)
    results = []
    for spec in json.loads(job_file.read_text()):
        if rank() == 0:
            print(spec, flush=True)
        results.append(checks[spec["check"]](make(spec, meshes)))
    if rank() == 0:
        result_file.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_checks(CHECKS, Job)
