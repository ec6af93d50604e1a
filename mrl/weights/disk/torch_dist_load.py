"""Megatron's own loading of a `torch_dist` checkpoint, step by step, without its unpickling.

By default, torch and Megatron run code from pickles in three places: `.metadata`, `common.pt` (if an environment
variable asks for it) and the objects between the tensors. Here all three are read with allow-lists of plain values.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from mrl import platform
from mrl.foreign import read_json
from mrl.weights.disk.fp8_state import restorable_state
from mrl.weights.disk.torch_dist_files import DIFFERS, FileSlice, equals_checksums, pickle_object, read_plain
from mrl.weights.errors import WeightError

platform.install()
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges  # noqa: E402
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: E402
    MCoreLoadPlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8  # noqa: E402

COMMON, FORMAT = "common.pt", "metadata.json"
# of CheckpointingConfig; megatron-core 0.16 still writes the last two
_FIELDS = {"sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version"}


def load(state: dict[str, Any], directory: Path, metadata: Metadata) -> dict[str, Any]:
    """Fills the sharded tensors of `state`; returns them as plain tensors of the local shape, beside the common values.
    Objects are returned as None, except the layers' fp8 state (`fp8_state`). Collective.

    metadata: from `load_metadata`. Raises WeightError, or torch's CheckpointException around it.
    """
    _require_format(directory / FORMAT)
    force_all_tensors_to_non_fp8(state)  # an fp8 tensor would round the values, and the main weights start from them
    result = _common(directory / COMMON)
    sharded, kept, factories = load_preprocess(state)
    merge(result, kept)
    merge(result, _sharded(extract_sharded_base(sharded)[0], directory, metadata))
    loaded: dict[str, Any] = apply_factory_merges(result, factories)
    return loaded


def _require_format(file: Path) -> None:
    """Raises a clearer error than Megatron, which reads the same file again."""
    try:
        content = read_json(file)
    except FileNotFoundError:
        raise WeightError(f"{file} does not exist") from None
    except (OSError, ValueError) as error:
        raise WeightError(str(error)) from error
    if not isinstance(content, dict) or content.get("sharded_backend") != "torch_dist" or not content.keys() <= _FIELDS:
        raise WeightError(f"{file} does not describe a torch_dist checkpoint")


def _common(file: Path) -> dict[str, Any]:
    common = read_plain(file, file)
    if not isinstance(common, dict):
        raise WeightError(f"{file} is damaged: it contains a {type(common).__name__}")
    return common


def _sharded(state: dict[str, Any], directory: Path, metadata: Metadata) -> dict[str, Any]:
    """Replicates TorchDistLoadShardedStrategy.load with another reader and planner."""
    tensors = [t for t in nested_values(state) if isinstance(t, ShardedTensor)]
    planner = _Planner(
        shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
    )
    by_key, flat, renamed = _replace_state_dict_keys_with_sharded_keys(state)
    wanted = mcore_to_pyt_state_dict(by_key, True)
    dcp.load(wanted, storage_reader=_Reader(directory, metadata), planner=planner)
    loaded = {key: _unwrap_pyt_sharded_tensor(value) for key, value in wanted.items()}
    result: dict[str, Any] = _replace_sharded_keys_with_state_dict_keys(loaded, flat, renamed)
    _restore_dict_types(result, state)
    return result


class _Reader(dcp.FileSystemReader):
    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata
        self._proved: set[tuple[str, int]] = set()  # file and offset of archives that equal their checksums

    def read_metadata(self) -> Metadata:
        """Takes no further arguments, or torch would look for a file of each rank next."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads file by file, so that an error can name the file. Tensors are read safely: torch uses weights_only for
        them.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except Exception as error:
                why = f": {error}" if isinstance(error, WeightError) else ""
                raise WeightError(f"{self.path}/{name} is damaged{why}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        if (place := (sinfo.relative_path, sinfo.offset)) not in self._proved:
            if not equals_checksums(FileSlice(file, sinfo.offset, sinfo.length)):
                raise WeightError(DIFFERS)
            self._proved.add(place)
        return super()._slice_file(file, sinfo)


class _Planner(MCoreLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Loads the checked fp8 state only: torch would run an object's pickle, and transformer-engine its content."""
        name = read_item.storage_index.fqn
        kept = restorable_state(read_plain(value, name), name)
        super().load_bytes(read_item, io.BytesIO(pickle_object(kept)))
