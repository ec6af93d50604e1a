"""Conversion of a Hugging Face directory to a Megatron checkpoint, and back, block by block.

Both directions work alike: a list of blocks (source rows, target rows), split into shares, moved by a worker pool.
Names and shapes are checked first, so that unused tensors on either side and a full disk are found before a byte is
written.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

from mrl.config.model_dirs import FORMAT, RELEASE, TRACKER, VERSION
from mrl.directories import Staging, write_manifest
from mrl.families import CONVERTED_DRAFTS, ModelArch, load_arch
from mrl.families.table import Role, weight_table
from mrl.parallel import Meshes
from mrl.weights.agreement import WeightAgreement, raise_together
from mrl.weights.convert import WORKERS
from mrl.weights.convert.blocks import Block, WorkerShare, split_blocks
from mrl.weights.convert.plan import (
    SourceModel,
    TorchDistPlan,
    create_files,
    plan_safetensors,
    plan_torch_dist,
)
from mrl.weights.convert.worker_pool import WorkerPool
from mrl.weights.disk.digest import file_digests, weight_files
from mrl.weights.disk.draft_layers import draft_metas
from mrl.weights.disk.hf_rows import parameter_rows
from mrl.weights.disk.megatron_dirs import open_megatron
from mrl.weights.disk.megatron_source import MegatronCheckpoint
from mrl.weights.disk.model_files import copy_model_files, role_of
from mrl.weights.disk.safetensors_io import HFCheckpoint
from mrl.weights.disk.staging import staged
from mrl.weights.disk.stored_names import stored_names
from mrl.weights.disk.torch_dist_files import BlockLocation, write_metadata
from mrl.weights.disk.torch_dist_load import COMMON
from mrl.weights.disk.unused import unused_tensors
from mrl.weights.errors import WeightError
from mrl.weights.meta import TensorMeta
from mrl.weights.model.export import Describe, copy_drafts, plan_files, write_index

BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion.

    dtype: of everything that is written; None: as stored. bucket_bytes: size of a worker's bucket.
    part: model of a run's checkpoint; model_files: directory of config.json, if the Megatron side does not name it.
    describe: writes further files into a Hugging Face directory.
    """

    dtype: torch.dtype | None = None
    workers: int = WORKERS
    allow_pickle: bool = False
    role: Role | None = None
    part: str | None = None
    model_files: Path | None = None
    bucket_bytes: int = BUCKET_BYTES
    max_file_bytes: int = 5_000_000_000
    timeout_s: float = 6 * 3600.0
    describe: Describe | None = None


@dataclass(frozen=True)
class ConvertReport:
    """Result of a conversion. seconds: for reading and writing, until the data is durable.

    nbytes: without the tensors of multi-token prediction layers
    """

    role: Role
    tensors: int
    nbytes: int
    seconds: float
    model_files: Path


def hf_to_megatron(path: Path, target: Path, options: ConvertOptions, meshes: Meshes) -> ConvertReport:
    """Writes `target`: a torch_dist checkpoint that every layout loads, and the model's other files. Collective.

    The embedding has the vocabulary's rows and no padding: Megatron pads with zeros when it loads. A critic made from a
    policy drops the lm_head and gets a value head of zeros. Raises WeightError on every rank, with a list of all
    problems; `target` is then unchanged.
    """
    role, arch = options.role or role_of(path), load_arch(path)
    source = SourceModel(path, arch, role, stored_names(arch, str(path), role, meshes))
    pool = WorkerPool(options.workers, options.timeout_s)
    started = time.monotonic()
    with contextlib.closing(_checked(path, arch, role, options.allow_pickle)) as checkpoint:
        plan = plan_torch_dist(checkpoint, source, options.dtype, options.allow_pickle, options.bucket_bytes)
    copied = _drafts(path, arch, role, options.allow_pickle)
    shares = split_blocks(plan.blocks, pool.size)
    nbytes = _bytes(plan.blocks)
    with staged(target, nbytes + sum(meta.nbytes for meta in copied)) as staging:
        weights = staging.directory / RELEASE
        pool.on_main(f"making {weights}", weights.mkdir)
        files = [weights / f"__{number}_0.distcp" for number in range(pool.size)]
        items = pool.write_shares(
            [
                WorkerShare(blocks, file, tuple(plan.objects) if number == 0 else ())
                for number, (blocks, file) in enumerate(zip(shares, files, strict=True))
            ]
        )

        def complete() -> None:
            if copied:
                drafts, files = staging.directory / CONVERTED_DRAFTS, plan_files(copied, options.max_file_bytes)
                drafts.mkdir()
                copy_drafts(path, files, drafts, options.allow_pickle)
                if len(files) > 1:
                    write_index(files, drafts)
            _complete_megatron(staging, source, plan, items, drafts=bool(copied))

        pool.on_main(f"completing {target}", complete)
    return ConvertReport(role, len(plan.tensors), nbytes, time.monotonic() - started, path)


def megatron_to_hf(path: Path, target: Path, options: ConvertOptions, meshes: Meshes) -> ConvertReport:
    """Writes `target`: a complete Hugging Face directory. Collective, and all or nothing, like `hf_to_megatron`.

    `path`: a converted model, a run's checkpoint (step_N), or any torch_dist directory with `options.model_files`.
    """
    pool = WorkerPool(options.workers, options.timeout_s)
    with open_megatron(path, options.part, options.model_files, options.role) as model:
        names = (
            model.names if model.names.keys else stored_names(model.arch, str(model.model_files), model.role, meshes)
        )
        source = SourceModel(model.weights, model.arch, model.role, names)
        started = time.monotonic()
        checkpoint = MegatronCheckpoint(model.weights, names, model.arch)
        check_megatron(checkpoint, source)
        partial = Staging(target, 0).directory
        copied = _drafts(model.drafts, model.arch, model.role, options.allow_pickle)
        plan = plan_safetensors(
            checkpoint, source, partial, options.dtype, options.max_file_bytes, options.bucket_bytes, copied
        )
        nbytes = _bytes(plan.blocks)
        with staged(target, nbytes + sum(meta.nbytes for meta in copied)) as staging:
            pool.on_main(f"making files in {partial}", lambda: create_files(plan.files, partial))
            pool.write_shares([WorkerShare(blocks) for blocks in split_blocks(plan.blocks, pool.size)])

            def complete() -> None:
                dtype = plan.files[0].tensors[0].dtype
                copy_model_files(model.model_files, partial, dtype, model.arch, model.role, drafts=bool(copied))
                if model.drafts is not None and copied:
                    copy_drafts(model.drafts, plan.files, partial, options.allow_pickle)
                if len(plan.files) > 1:
                    write_index(plan.files, partial)
                if options.describe is not None:
                    options.describe(partial, file_digests(weight_files(partial)))
                staging.commit()

            pool.on_main(f"completing {target}", complete)
        tensors = sum(len(file.tensors) for file in plan.files)
        return ConvertReport(model.role, tensors, nbytes, time.monotonic() - started, model.model_files)


def check_megatron(checkpoint: MegatronCheckpoint, source: SourceModel) -> None:
    """Raises WeightError that lists tensors which are missing, damaged, of a wrong shape or unused."""
    table = weight_table(source.arch, source.role)
    problems = list(unused_tensors(checkpoint, source.arch, table, source.role))
    for row in table.values():
        try:
            for name in row.hf if row.copy_of is None else ():
                checkpoint.rows(name)
        except WeightError as error:
            problems.append(str(error))
    _raise_all(problems, source.path, source.arch, source.role)


def _drafts(model: Path | None, arch: ModelArch, role: Role, allow_pickle: bool) -> list[TensorMeta]:
    """Returns the tensors of the MTP layers in `model`. Collective; raises WeightError on every rank."""
    what = f"reading the multi-token prediction layers of {model} failed"
    return WeightAgreement().on_main(what, lambda: draft_metas(model, arch, role, allow_pickle))


def _checked(path: Path, arch: ModelArch, role: Role, allow_pickle: bool) -> HFCheckpoint:
    """Opens the Hugging Face side. Raises WeightError as `check_megatron`."""
    checkpoint = HFCheckpoint(path, allow_pickle)
    table = weight_table(arch, role)
    problems = list(unused_tensors(checkpoint, arch, table, role))
    for row in table.values():
        try:
            parameter_rows(checkpoint, row, arch, allow_pickle)
        except WeightError as error:
            problems.append(str(error))
    _raise_all(problems, path, arch, role)
    return checkpoint


def _raise_all(problems: Sequence[str], path: Path, arch: ModelArch, role: Role) -> None:
    raise_together(list(dict.fromkeys(problems)), f"{path} does not fit its config.json ({arch.family}, {role})")


def _bytes(blocks: Sequence[Block]) -> int:
    return sum(block.nbytes for block in blocks)


def _complete_megatron(
    staging: Staging, source: SourceModel, plan: TorchDistPlan, items: Sequence[BlockLocation], *, drafts: bool
) -> None:
    root, weights = staging.directory, staging.directory / RELEASE
    write_metadata(weights, plan.tensors, items)
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, weights / COMMON)
    save_config(CheckpointingConfig("torch_dist", 1), str(weights))
    (root / TRACKER).write_text(RELEASE)
    dtype = plan.blocks[0].dtype
    copy_model_files(source.path, root, dtype, source.arch, source.role, drafts=drafts)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "family": source.arch.family,
        "role": source.role,
        "dtype": str(dtype).removeprefix("torch."),
        "vocabulary_rows": source.arch.vocab_size,
        "keys": dict(source.names.keys),
    }
    write_manifest(root, manifest)
    staging.commit()
