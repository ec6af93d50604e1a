"""A model's state as checkpoints hold it: parameters, and nothing of what a kind of layer keeps beside them.

transformer-engine's layers keep their fp8 state in objects, empty without fp8, which other layers do not have. Without
them a checkpoint fits every kind of layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mrl import platform
from mrl.weights.errors import WeightError

platform.install()
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402

BESIDE = "_extra_state"


def parameters(sharded: Mapping[str, Any]) -> dict[str, Any]:
    """Those entries of a `sharded_state_dict` that hold parameters."""
    return {name: entry for name, entry in sharded.items() if not _is_beside(entry)}


def _is_beside(entry: Any) -> bool:
    return isinstance(entry, ShardedObject) and entry.key.rpartition(".")[2].endswith(BESIDE)


def fill(chunk: nn.Module, state: dict[str, Any]) -> None:
    """Puts `state` into the parameters. Raises WeightError if one of them, or of the state, is left over."""
    left = chunk.load_state_dict(state, strict=False)
    problems = [f"{name} is missing" for name in left.missing_keys if BESIDE not in name]
    problems += [f"nothing takes {name}" for name in left.unexpected_keys if BESIDE not in name]
    if problems:
        raise WeightError("; ".join(problems))
