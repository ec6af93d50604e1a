"""Loading of a Hugging Face directory into this rank's part of a Megatron model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mrl import platform
from mrl.config.model_dirs import is_converted
from mrl.families import ModelArch, is_reward_model
from mrl.families.rows import ParameterMapping
from mrl.families.table import EMBEDDING, HF_VALUE_HEAD, OUTPUT, Role, weight_table
from mrl.models import fp8_params
from mrl.parallel import Mesh
from mrl.weights.agreement import raise_together
from mrl.weights.disk.megatron_dirs import converted
from mrl.weights.disk.megatron_source import MegatronCheckpoint
from mrl.weights.disk.rows import all_finite
from mrl.weights.disk.safetensors_io import HFCheckpoint
from mrl.weights.disk.unused import Checkpoint, unused_tensors
from mrl.weights.errors import WeightError
from mrl.weights.model.names import named_parameters
from mrl.weights.parameter_layout import Sliceable, to_megatron


@dataclass(frozen=True)
class ParameterLoad:
    """A parameter of this rank and its source tensors."""

    name: str
    parameter: nn.Parameter
    row: ParameterMapping
    sources: list[StoredSource]


class StoredSource(Sliceable, Protocol):
    """A tensor on disk; `label` names file and tensor in errors."""

    @property
    def label(self) -> str: ...


def load_pretrained(
    chunks: Sequence[nn.Module],
    arch: ModelArch,
    path: str | Path,
    mesh: Mesh,
    *,
    role: Role = "policy",
    allow_pickle: bool = False,
) -> None:
    """Loads by `load_hf` from a Hugging Face directory, or from a converted one, which has the same tensors in
    Megatron's form.

    A critic that is loaded from a converted policy keeps its value head as built, as from Hugging Face.
    """
    if not is_converted(path):
        load_hf(chunks, arch, path, mesh, role=role, allow_pickle=allow_pickle)
        return
    _load(chunks, arch, path, mesh, role, lambda: _open_converted(Path(path), arch))


def _open_converted(path: Path, arch: ModelArch) -> MegatronCheckpoint:
    try:
        model = converted(path)
    except ValueError as error:
        raise WeightError(str(error)) from error
    return MegatronCheckpoint(model.weights, model.names, arch)


def load_hf(
    chunks: Sequence[nn.Module],
    arch: ModelArch,
    path: str | Path,
    mesh: Mesh,
    *,
    role: Role = "policy",
    allow_pickle: bool = False,
) -> None:
    """Fills the parameters of `chunks` (wrapped or not) in place; collective over the world.

    Every rank reads only the slices that it holds, one parameter at a time. Padding rows of the vocabulary become zero,
    both copies of tied embeddings are written, values are cast to the parameter's dtype. An optimizer that was built
    before must copy its main parameters from the model again.

    role "critic": an lm_head in the checkpoint is ignored (the critic may be started from a policy, tied or not) and
    the value head stays as built unless the checkpoint has `score.weight`, as a reward model must.

    Raises WeightError on every rank, with a list of all problems: missing tensors, tensors and parameters that nothing
    uses, an output layer that differs from the tied embedding, wrong shapes, unreadable files, NaN or infinity.
    """
    _load(chunks, arch, path, mesh, role, lambda: _open_hf(path, role, allow_pickle))


def _open_hf(path: str | Path, role: Role, allow_pickle: bool) -> HFCheckpoint:
    checkpoint = HFCheckpoint(path, allow_pickle)
    if role == "critic" and is_reward_model(path) and HF_VALUE_HEAD not in checkpoint:
        checkpoint.close()
        raise WeightError(f"{path}/config.json names a reward model, but its weights have no {HF_VALUE_HEAD}")
    return checkpoint


def _load(
    chunks: Sequence[nn.Module],
    arch: ModelArch,
    path: str | Path,
    mesh: Mesh,
    role: Role,
    opened: Callable[[], Checkpoint],
) -> None:
    table = weight_table(arch, role)
    problems: list[str] = []
    held, unclaimed = _match(chunks, table, problems)
    checkpoint: Checkpoint | None = None
    items: list[ParameterLoad] = []
    try:
        checkpoint = opened()
        items = _plan(checkpoint, table, held, problems)
        problems += unused_tensors(checkpoint, arch, table, role, compare_tied=_rank() == 0)
    except (WeightError, ValueError, OSError) as e:
        problems.append(str(e))
    problems += [f"the model has no parameter {name}" for name in unclaimed]
    raise_together(problems, f"{path} does not fit the model ({arch.family}, {role}, {mesh})")
    problems = []
    try:
        with torch.no_grad():
            for item in items:
                _fill(item, arch, mesh)
    except (WeightError, ValueError, OSError) as e:
        problems.append(str(e))
    finally:
        if checkpoint is not None:
            checkpoint.close()
    raise_together(problems, f"loading {path} failed")
    raise_together(_tied_problems(items, mesh), f"loading {path} failed")


def _match(
    chunks: Sequence[nn.Module], table: Mapping[str, ParameterMapping], problems: list[str]
) -> tuple[dict[str, nn.Parameter], list[str]]:
    """Returns this rank's parameters by global name, and the table's rows that no rank of the world holds."""
    held: dict[str, nn.Parameter] = {}
    for name, parameter in named_parameters(chunks):
        if name in table:
            held[name] = parameter
        else:
            problems.append(f"parameter {name} of the model is not in the weight table")
    claimed = torch.tensor([name in held for name in table], dtype=torch.uint8, device=platform.device())
    if dist.is_initialized():
        dist.all_reduce(claimed, op=dist.ReduceOp.MAX)
    return held, [
        name
        for (name, row), got in zip(table.items(), claimed.tolist(), strict=True)
        if not got and row.copy_of is None
    ]


def _plan(
    checkpoint: Checkpoint, table: Mapping[str, ParameterMapping], held: Mapping[str, nn.Parameter], problems: list[str]
) -> list[ParameterLoad]:
    items = []
    for name, parameter in held.items():
        row = table[name]
        if row.optional and not any(source in checkpoint for source in row.hf):
            continue
        try:
            sources = [_source(checkpoint, row, i) for i in range(len(row.hf))]
        except WeightError as e:
            problems.append(str(e))
            continue
        items.append(ParameterLoad(name, parameter, row, sources))
    return items


def _source(checkpoint: Checkpoint, row: ParameterMapping, i: int) -> StoredSource:
    """Returns the i-th tensor of a row, in whichever of its on-disk forms the checkpoint has."""
    if row.hf[i] not in checkpoint and row.aliases:
        alias = row.aliases[i]
        if alias.name in checkpoint:
            return checkpoint.source(alias.name, alias.shape).narrow(alias.ranges, len(row.shapes[i]))
    return checkpoint.source(row.hf[i], row.shapes[i])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _fill(item: ParameterLoad, arch: ModelArch, mesh: Mesh) -> None:
    tp, tp_rank = mesh.tensor_cut(item.row.expert)
    parameter = item.parameter
    padded_vocab = parameter.shape[0] * tp if item.row.kind == "vocab" else 0
    shard = to_megatron(item.row, item.sources, arch, tp, tp_rank, padded_vocab)
    if shard.shape != parameter.shape:
        raise WeightError(
            f"{item.name}: the model has {list(parameter.shape)}, and its part of {', '.join(item.row.hf)} is "
            f"{list(shard.shape)}"
        )
    fp8_params.write(parameter, shard)
    if not all_finite(fp8_params.values_of(parameter)):
        bad = [source.label for source in item.sources if not all_finite(source[:])]
        raise WeightError(
            f"{', '.join(bad)} contains NaN or infinity"
            if bad
            else f"{item.sources[0].label} has values beyond the range of {parameter.dtype}: they would become infinite"
        )
    _mark(item, tp)


def _mark(item: ParameterLoad, tp: int) -> None:
    """Sets Megatron's tensor-parallel attributes, which the gradient norm relies on; refuses contradictory ones.

    For experts the table decides: transformer-engine is not told how they are sharded, and marks dimension 0 of all.
    """
    attributes = vars(item.parameter)
    cut, dim = attributes.get("tensor_model_parallel"), attributes.get("partition_dim", -1)
    wanted = item.row.tp_dim
    if wanted is None:
        if cut and tp > 1:
            raise WeightError(f"{item.name}: the model splits it by tensor parallelism, but the weight table does not")
        return
    if cut and dim != wanted and not item.row.expert:
        raise WeightError(f"{item.name}: the model splits dimension {dim}, but the weight table dimension {wanted}")
    if not cut or dim != wanted:
        attributes.update(tensor_model_parallel=True, partition_dim=wanted, partition_stride=1)


def _tied_problems(items: Iterable[ParameterLoad], mesh: Mesh) -> list[str]:
    """Checks that the tied embeddings of the first and last pipeline stage have the same bits."""
    if mesh.pp == 1:
        return []
    copies = {item.name: _digest(item.parameter) for item in items if item.row.kind == "vocab"}
    by_stage: list[dict[str, str]] = [{}] * mesh.pp
    dist.all_gather_object(by_stage, copies, group=mesh.pp_group)
    tied = any(item.row.copy_of for item in items)
    if tied and by_stage[0].get(EMBEDDING) != by_stage[-1].get(OUTPUT):
        return ["the tied embeddings of the first and the last pipeline stage differ"]
    return []


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous()
    return hashlib.blake2b(platform.host_bytes(raw)).hexdigest()
