"""Sharded state in Megatron's `torch_dist` format: every rank writes and reads its own part, in any layout.

The steps of dist_checkpointing.save, in two halves. Everything that needs other ranks is planned first, with an error
check after each step: in Megatron a failure of rank 0's own work (checks, the common file) would leave the others
waiting. Each rank then writes its files alone, with torch's own writer, at any time.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from mrl import platform
from mrl.checkpoint.agreement import RANKS, CheckpointError
from mrl.parallel import gather, rank
from mrl.weights.disk.torch_dist_files import load_metadata
from mrl.weights.disk.torch_dist_load import COMMON, load
from mrl.weights.model.state import requested_entries

platform.install()
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica  # noqa: E402
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess  # noqa: E402
from megatron.core.dist_checkpointing.strategies.fully_parallel import (  # noqa: E402
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: E402
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base  # noqa: E402
from megatron.core.dist_checkpointing.validation import (  # noqa: E402
    determine_global_metadata,
    validate_sharding_integrity,
)

BACKEND, VERSION = "torch_dist", 1
LISTED = 8  # problems listed in an error


@dataclass
class ShardedWrite:
    """Sharded state whose writing is planned on all ranks; this rank's part of it.

    nbytes: bytes that this rank writes
    """

    directory: Path
    nbytes: int
    _common: dict[str, Any]
    _writer: dcp.FileSystemWriter
    _planner: MCoreSavePlanner
    _plan: SavePlan
    _metadata: Metadata | None  # rank 0's

    def write(self) -> list[WriteResult]:
        """Writes this rank's files, synced to disk, and returns the results. Local, so any thread may call it."""
        written = self._writer.write_data(self._plan, self._planner)
        written.wait()
        return written.value()

    def complete(self, results: list[list[WriteResult]]) -> None:
        """Writes the files that describe the whole, on rank 0, given the results of `write` on every rank."""
        assert self._metadata is not None
        torch.save(self._common, self.directory / COMMON)
        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig(BACKEND, VERSION), str(self.directory))


def plan(
    state: dict[str, Any],
    common: dict[str, Any],
    directory: Path,
    dp_cp_group: dist.ProcessGroup,
    *,
    copy: bool,
) -> ShardedWrite:
    """Plans the writing of `state` (Megatron's sharded tensors) and `common` (plain values; rank 0's are written).
    Collective.

    Tensors that data-parallel ranks share are divided among them. With `copy`, this rank's tensors are copied into host
    memory; else they are written from where they are. Raises CheckpointError on every rank.
    """
    sharded, _ = RANKS.together(f"checking the shards for {directory}", lambda: save_preprocess(state))
    RANKS.together(f"dividing the shards for {directory}", lambda: _divide(sharded, dp_cp_group))
    nbytes = sum(t.data.numel() * t.data.element_size() for t in _mine(sharded))
    if copy:
        RANKS.together(f"copying the shards for {directory}", lambda: _copy(sharded))
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    tensors = mcore_to_pyt_state_dict(by_key)
    planner = MCoreSavePlanner(flatten_state_dict=False, can_run_decentralized_global_plan=False)
    writer = dcp.FileSystemWriter(directory, sync_files=True)
    metadata: Metadata | None = None

    def of_this_rank() -> SavePlan:
        planner.set_up_planner(tensors, storage_meta=writer.storage_meta(), is_coordinator=rank() == 0)
        writer.set_up_storage_writer(rank() == 0, rank=rank(), use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def of_all(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans)

    with _no_advice():
        exchange = _DistWrapper(None, True, 0)
        mine = RANKS.together(f"planning {directory}", lambda: exchange.reduce_scatter("plan", of_this_rank, of_all))
    return ShardedWrite(directory, nbytes, common, writer, planner, planner.finish_plan(mine), metadata)


def _divide(sharded: dict[str, Any], dp_cp_group: dist.ProcessGroup) -> None:
    """Assigns each shard to one writer of the data-parallel group, evenly by size."""
    distribution = determine_main_replica_uniform_distribution(sharded, dp_cp_group)
    distribute_main_replicas_with_precomputed_distribution(sharded, dp_cp_group, distribution)
    validate_sharding_integrity(determine_global_metadata(sharded)[1])


def _mine(sharded: Any) -> list[ShardedTensor]:
    """Tensors that this rank writes."""
    tensors = [t for t in nested_values(sharded) if isinstance(t, ShardedTensor)]
    return [t for t in tensors if is_main_replica(t.replica_id)]


def _copy(sharded: dict[str, Any]) -> None:
    tensors = _mine(sharded)
    for tensor, copy in zip(tensors, platform.to_host([tensor.data for tensor in tensors]), strict=True):
        tensor.data = copy


def read(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Fills the sharded tensors of `state`; returns them as plain ones, beside the common values. Collective.

    Raises CheckpointError on every rank, before anything is loaded, if names or shapes differ.
    """
    sharded, _ = extract_sharded_base(load_preprocess(state)[0])
    tensors = {t.key: t for t in nested_values(sharded) if isinstance(t, ShardedTensor)}
    asked_for = set().union(*gather(set(tensors)))
    metadata = RANKS.together(f"comparing the model with {directory}", lambda: _compare(tensors, asked_for, directory))
    with _no_advice():
        return RANKS.together(
            f"reading {directory}",
            lambda: load(requested_entries(state, metadata.state_dict_metadata), directory, metadata),
        )


def _compare(tensors: dict[str, ShardedTensor], asked_for: set[str], directory: Path) -> Metadata:
    metadata = load_metadata(directory)
    stored = {
        key: tuple(entry.size)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, dcp.metadata.TensorStorageMetadata)
    }
    problems = [f"{key} is not in the checkpoint" for key in sorted(tensors.keys() - stored.keys())]
    problems += [f"{key} is only in the checkpoint" for key in sorted(stored.keys() - asked_for)]
    for key, tensor in tensors.items():
        here = tuple(tensor.global_shape)
        if key in stored and not tensor.allow_shape_mismatch and here != stored[key]:
            problems.append(f"{key} is {here} here and {stored[key]} in the checkpoint")
    if problems:
        more = [f"and {len(problems) - LISTED} more"] if len(problems) > LISTED else []
        raise CheckpointError("; ".join(problems[:LISTED] + more))
    return metadata


@contextlib.contextmanager
def _no_advice() -> Iterator[None]:
    """Silences the deprecation warnings of torch's ShardedTensor and load_state_dict, which Megatron still uses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use DTensor|`load_state_dict` is deprecated")
        yield
