"""A sharded state in Megatron's `torch_dist` format: every rank writes and reads its own part, in any layout.

The steps of dist_checkpointing.save, with two differences. After each step the ranks agree that it succeeded: in
Megatron what only rank 0 does (checks, the common file) would leave the others waiting if it failed. And torch's own
synchronous writer is used, which needs no helper processes.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from mrl import platform
from mrl.checkpoint.agreement import CheckpointError, gather, on_main, together

platform.install()
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica  # noqa: E402
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess  # noqa: E402
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy  # noqa: E402
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy  # noqa: E402
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: E402
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base  # noqa: E402

BACKEND, VERSION = "torch_dist", 1
LISTED = 8  # problems an error spells out


class SynchronousSave(SaveShardedStrategy):
    """Writes the main replicas that this rank holds to files of its own, and syncs them to disk."""

    def __init__(self) -> None:
        super().__init__(BACKEND, VERSION)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path | str) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        with _no_advice():
            dcp.save(
                mcore_to_pyt_state_dict(by_key),
                storage_writer=dcp.FileSystemWriter(checkpoint_dir, sync_files=True),
                planner=MCoreSavePlanner(flatten_state_dict=False, can_run_decentralized_global_plan=False),
            )


def write(state: dict[str, Any], common: dict[str, Any], directory: Path, dp_cp_group: Any) -> None:
    """Collective. `state` holds Megatron's sharded tensors; `common` plain values, rank 0's are written.

    Tensors that data-parallel ranks share are divided among them. Raises CheckpointError on every rank.
    """
    on_main(f"making {directory}", directory.mkdir)
    together(f"finding {directory}", lambda: _require(directory))
    sharded, _ = together(f"checking the shards for {directory}", lambda: save_preprocess(state))
    needed = sum(gather(_bytes_to_write(sharded)))
    free = on_main(f"looking for space in {directory}", lambda: _space_for(needed, directory))
    what = f"writing {directory} ({_size(needed)}; {_size(free)} were free)"
    on_main(what, lambda: TorchCommonSaveStrategy("torch", 1).save_common(common, directory))
    strategy = FullyParallelSaveStrategyWrapper(SynchronousSave(), dp_cp_group)
    together(what, lambda: strategy.save(sharded, directory))
    on_main(what, lambda: save_config(CheckpointingConfig(BACKEND, VERSION), str(directory)))


def read(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Collective. Fills the sharded tensors of `state`; returns them as plain ones, beside the common values.

    Raises CheckpointError on every rank, before anything is loaded, if names or shapes differ.
    """
    wanted, _ = extract_sharded_base(load_preprocess(state)[0])
    tensors = {t.key: t for t in nested_values(wanted) if isinstance(t, ShardedTensor)}
    asked_for = set().union(*gather(set(tensors)))
    together(f"comparing the model with {directory}", lambda: _compare(tensors, asked_for, directory))
    with _no_advice():
        return together(
            f"reading {directory}",
            lambda: dist_checkpointing.load(state, str(directory), validate_access_integrity=False),
        )


def _compare(tensors: dict[str, ShardedTensor], asked_for: set[str], directory: Path) -> None:
    stored = {
        key: tuple(entry.size)
        for key, entry in dcp.FileSystemReader(directory).read_metadata().state_dict_metadata.items()
        if isinstance(entry, dcp.metadata.TensorStorageMetadata)
    }
    problems = [f"{key} is not in the checkpoint" for key in sorted(tensors.keys() - stored.keys())]
    problems += [f"{key} is only in the checkpoint" for key in sorted(stored.keys() - asked_for)]
    for key, tensor in tensors.items():
        here = tuple(tensor.global_shape)
        if key in stored and not tensor.allow_shape_mismatch and here != stored[key]:
            problems.append(f"{key} is {here}, in the checkpoint {stored[key]}")
    if problems:
        more = [f"and {len(problems) - LISTED} more"] if len(problems) > LISTED else []
        raise CheckpointError("; ".join(problems[:LISTED] + more))


def _require(directory: Path) -> None:
    if not directory.is_dir():
        raise CheckpointError("it is not there: run.root must be on a file system that all nodes share")


@contextlib.contextmanager
def _no_advice() -> Iterator[None]:
    """Megatron still uses torch's ShardedTensor, which warns at every use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use DTensor")
        yield


def _bytes_to_write(sharded: dict[str, Any]) -> int:
    tensors = [t for t in nested_values(sharded) if isinstance(t, ShardedTensor) and is_main_replica(t.replica_id)]
    return sum(t.data.numel() * t.data.element_size() for t in tensors)


def _space_for(needed: int, directory: Path) -> int:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CheckpointError(f"the disk is too full: {_size(needed)} needed, {_size(free)} free")
    return free


def _size(count: int) -> str:
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"
