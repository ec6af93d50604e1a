"""Export of a Megatron model to Hugging Face tensors, as a stream or as a directory on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from mrl.families import ModelArch
from mrl.families.adapters import LoRA, adapter_table
from mrl.families.rows import ParameterMapping
from mrl.families.stacks import slice_of, stored_name, stored_shapes
from mrl.families.table import VALUE_HEAD, Role, weight_table
from mrl.files import sync
from mrl.models.fp8_params import values_of
from mrl.parallel import Mesh, gather, rank
from mrl.weights.agreement import WeightAgreement, raise_together
from mrl.weights.disk.digest import file_digests
from mrl.weights.disk.draft_layers import draft_metas, open_drafts
from mrl.weights.disk.model_files import copy_model_files
from mrl.weights.disk.safetensors_io import INDEX, SINGLE
from mrl.weights.disk.staging import staged
from mrl.weights.errors import WeightError
from mrl.weights.meta import COPIED, TensorMeta
from mrl.weights.model.names import named_parameters, trained_parameters
from mrl.weights.parameter_layout import to_hf

GIB = 1 << 30

# writes a model's description into its complete directory; argument: SHA-256 by name of the weight file
Describe = Callable[[Path, dict[str, str]], None]


class Exporter:
    """Weights of a model under their Hugging Face names, as files have them. Construction is collective over the world.

    Each tensor has one sender: the first tensor-parallel rank of data- and context-parallel replica 0 of the pipeline
    stage that holds it; for experts the first expert-tensor-parallel rank of their expert-parallel rank. Tensors that
    files stack over all experts are gathered on the first expert-parallel rank, one tensor at a time.

    A model with a value head is a critic: its backbone and `score.weight` are exported. `read` may return another
    tensor with the parameter's layout, such as its gradient; the metas still describe the parameters.

    lora: export the model's adapters, and a value head, in place of its weights
    Raises WeightError on every rank if a parameter has no row in the weight table, or a row no parameter.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        arch: ModelArch,
        mesh: Mesh,
        *,
        read: Callable[[nn.Parameter], Tensor] = values_of,
        lora: LoRA | None = None,
    ) -> None:
        self.arch, self.mesh, self._read = arch, mesh, read
        self._all = parameters = list(named_parameters(chunks) if lora is None else trained_parameters(chunks))
        self.role: Role = "critic" if any(gather(any(name == VALUE_HEAD for name, _ in parameters))) else "policy"
        table = weight_table(arch, self.role) if lora is None else adapter_table(arch, self.role, lora)
        problems: list[str] = []
        self._mine: list[tuple[ParameterMapping, nn.Parameter]] = []
        self._stacks: dict[
            str, list[tuple[ParameterMapping, nn.Parameter]]
        ] = {}  # by name of the stacked tensor in files
        self._shapes = stored_shapes(table.values())
        for name, parameter in parameters:
            row = table.get(name)
            if row is None:
                problems.append(f"parameter {name} of the model is not in the weight table")
            elif row.copy_of is None and self._in_replica(row):
                self._take(row, parameter)
        self._metas = self._gather_metas()
        problems += self._incomplete({*self._shapes})
        raise_together(problems, f"the model cannot be exported ({arch.family}, {self.role}, {mesh})")

    def metas(self) -> list[TensorMeta]:
        """Returns every tensor of the model, the same list on all ranks; a sender's are in the order of its stream."""
        return self._metas

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor of its full shape) for the tensors that this rank sends; nothing on other ranks.

        Every rank must exhaust the stream: the ranks of a sender's tensor-parallel group contribute their shards.
        Tensors are contiguous and on the model's device; some are views of parameters: use them before the next update,
        and do not write to them. Raises WeightError, on every rank, for parameters that are not on the device.
        """
        for name, parameter in self._all:
            if parameter.numel() and not parameter.untyped_storage().nbytes():
                raise WeightError(f"{name} cannot be exported: the model's parameters are offloaded")
        for row, parameter in self._mine:
            if slice_of(row.hf[0]) is not None:
                yield from self._together(stored_name(row.hf[0]))
                continue
            shards = self._gather(row, self._read(parameter))
            if shards is not None:
                yield from zip(row.hf, to_hf(row, shards, self.arch), strict=True)
                yield from ((name, shards[0].new_zeros(shape)) for name, shape in row.zeros)

    def _take(self, row: ParameterMapping, parameter: nn.Parameter) -> None:
        """Adds a parameter; the first slice of a stack represents all of them."""
        whole = stored_name(row.hf[0])
        if whole != row.hf[0]:
            self._stacks.setdefault(whole, []).append((row, parameter))
        if whole == row.hf[0] or len(self._stacks[whole]) == 1:
            self._mine.append((row, parameter))

    def _together(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Gathers a tensor of which every expert-parallel rank holds consecutive slices; yields it on the first of
        these ranks.
        """
        parts, is_first = self._stacks[name], self.mesh.ep_rank == 0
        first = self._read(parts[0][1])
        whole = first.new_empty(self._shapes[name]) if is_first else None
        own = first.new_empty(len(parts), *self._shapes[name][1:]) if whole is None else whole[: len(parts)]
        for place, (row, parameter) in zip(own, parts, strict=True):
            place.copy_(to_hf(row, [self._read(parameter)], self.arch)[0])
        if self.mesh.ep > 1:
            runs = None if whole is None else list(whole.split(len(parts)))
            dist.gather(own, runs, group=self.mesh.ep_group, group_dst=0)
        if whole is not None:
            yield name, whole

    def _in_replica(self, row: ParameterMapping) -> bool:
        if row.expert:
            return self.mesh.edp_rank == 0
        return self.mesh.dp_rank == 0 and self.mesh.cp_rank == 0

    def _gather(self, row: ParameterMapping, shard: Tensor) -> list[Tensor] | None:
        """Returns all shards on the sender, None elsewhere."""
        tp, tp_rank = self.mesh.tensor_cut(row.expert)
        if row.tp_dim is None or tp == 1:
            return [shard] if tp_rank == 0 else None
        shard = shard.contiguous()
        shards = [torch.empty_like(shard) for _ in range(tp)] if tp_rank == 0 else None
        group = self.mesh.expert_tp_group if row.expert else self.mesh.tp_group
        dist.gather(shard, shards, group=group, group_dst=0)
        return shards

    def _gather_metas(self) -> list[TensorMeta]:
        mine = [
            TensorMeta(name, shape, parameter.dtype, rank())
            for row, parameter in self._mine
            if self._sends(row)
            for name, shape in [*((stored_name(hf), self._shapes[stored_name(hf)]) for hf in row.hf), *row.zeros]
        ]
        return [meta for metas in gather(mine) for meta in metas]

    def _sends(self, row: ParameterMapping) -> bool:
        is_first = slice_of(row.hf[0]) is None or self.mesh.ep_rank == 0
        return is_first and self.mesh.tensor_cut(row.expert)[1] == 0

    def _incomplete(self, wanted: set[str]) -> list[str]:
        found = [meta.name for meta in self._metas]
        missing = [f"no rank holds {name}" for name in sorted(wanted - set(found))]
        twice = {name for name in found if found.count(name) > 1} if len(found) != len(set(found)) else set()
        return missing + [f"more than one rank would send {name}" for name in sorted(twice)]


@dataclass(frozen=True)
class OutputFile:
    name: str
    sender: int
    tensors: tuple[TensorMeta, ...]


def plan_files(metas: Sequence[TensorMeta], max_bytes: int) -> list[OutputFile]:
    """Splits each sender's tensors, in order, into files of at most `max_bytes` (a larger tensor has its own)."""
    groups: list[list[TensorMeta]] = []
    size = 0
    for meta in metas:
        if not groups or groups[-1][0].sender != meta.sender or size + meta.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(meta)
        size += meta.nbytes
    if len(groups) == 1:
        return [OutputFile(SINGLE, groups[0][0].sender, tuple(groups[0]))]
    return [
        OutputFile(f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors", group[0].sender, tuple(group))
        for i, group in enumerate(groups)
    ]


def save_hf(
    exporter: Exporter,
    src_dir: str | Path,
    dst_dir: str | Path,
    *,
    max_file_bytes: int = 4 * GIB,
    overwrite: bool = False,
    drafts: Path | None = None,
    allow_pickle: bool = False,
    describe: Describe | None = None,
) -> None:
    """Writes a complete Hugging Face directory; collective over the world, `dst_dir` on a file system that all ranks
    share.

    drafts: model directory whose multi-token prediction layers are copied unchanged; None: the export has none
    allow_pickle: read these layers from pickles too
    describe: writes further files on rank 0, before the directory gets its name
    Weights come from the exporter, at most one file's worth at a time on a sender; config.json (with the weights'
    dtype), tokenizer, generation config and chat template from `src_dir`. Everything is written next to `dst_dir` and
    renamed when it is durable, so a directory of that name is complete or was not touched.
    Raises WeightError on every rank if `dst_dir` is not empty (unless `overwrite`) or a file cannot be written; no
    partial directory remains then.
    """
    target, metas, what = Path(dst_dir), exporter.metas(), f"writing {dst_dir} failed"
    copied = WeightAgreement().on_main(what, lambda: draft_metas(drafts, exporter.arch, exporter.role, allow_pickle))
    files = plan_files([*metas, *copied], max_file_bytes)
    with staged(target, sum(meta.nbytes for meta in (*metas, *copied)), overwrite=overwrite) as staging:

        def complete() -> None:
            dtype, arch, role = metas[0].dtype, exporter.arch, exporter.role
            copy_model_files(Path(src_dir), staging.directory, dtype, arch, role, drafts=bool(copied))
            if drafts is not None and copied:
                copy_drafts(drafts, files, staging.directory, allow_pickle)
            if len(files) > 1:
                write_index(files, staging.directory)
            if describe is not None:
                own = [staging.directory / file.name for file in files if file.sender == COPIED]
                describe(staging.directory, digests | file_digests(own))
            staging.commit()

        written: dict[str, str] = {}
        raise_together(write_weights(exporter, files, staging.directory, None if describe is None else written), what)
        digests = {name: digest for part in gather(written) for name, digest in part.items()}
        WeightAgreement().on_main(what, complete)


def write_weights(
    exporter: Exporter, files: Sequence[OutputFile], directory: Path, digests: dict[str, str] | None = None
) -> list[str]:
    """Writes this rank's files and adds their digests to `digests`; returns the problems. After an error the stream is
    still exhausted, or its other ranks would wait for ever.
    """
    todo = [file for file in files if file.sender == rank()]
    pending: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, tensor in exporter.stream():
        if problems:
            continue
        pending[name] = tensor.cpu()
        if len(pending) < len(todo[0].tensors):
            continue
        file = todo.pop(0)
        try:
            save_file(pending, directory / file.name, metadata={"format": "pt"})
            sync(directory / file.name)
            if digests is not None:
                digests |= file_digests([directory / file.name])
        except (OSError, SafetensorError) as e:
            problems.append(f"{directory / file.name}: {e}")
        pending = {}
    return problems


def copy_drafts(model: Path, files: Sequence[OutputFile], directory: Path, allow_pickle: bool) -> None:
    """Writes those of `files` that have tensors of MTP layers, unchanged; one file at a time is in memory."""
    with closing(open_drafts(model, allow_pickle)) as checkpoint:
        for file in (file for file in files if file.sender == COPIED):
            tensors = {meta.name: checkpoint.source(meta.name)[:] for meta in file.tensors}
            save_file(tensors, directory / file.name, metadata={"format": "pt"})
            sync(directory / file.name)


def write_index(files: Sequence[OutputFile], directory: Path) -> None:
    index = {
        "metadata": {"total_size": sum(meta.nbytes for file in files for meta in file.tensors)},
        "weight_map": {meta.name: file.name for file in files for meta in file.tensors},
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
