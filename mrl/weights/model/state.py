"""A model's state out of a checkpoint that other layers may have written.

transformer-engine's layers keep their fp8 state in objects, empty without fp8, which other layers do not have. Empty
ones are written too, since Megatron's own loader asks for them. What a checkpoint has none of is not asked for, and
what nothing takes is left there: it fits every kind of layer.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import nn

from mrl import platform
from mrl.weights.errors import WeightError

platform.install()
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402

BESIDE = "_extra_state"


def wanted(sharded: Mapping[str, Any], stored: Container[str]) -> dict[str, Any]:
    """Of a `sharded_state_dict`, nested or not, what a checkpoint with the keys `stored` can be asked for: parameters,
    there or not, and such objects as it has."""
    return {
        name: wanted(entry, stored) if isinstance(entry, dict) else entry
        for name, entry in sharded.items()
        if not (_is_beside(entry) and entry.unique_key not in stored)
    }


def _is_beside(entry: Any) -> bool:
    return isinstance(entry, ShardedObject) and entry.key.endswith(BESIDE)


def fill(chunk: nn.Module, state: dict[str, Any]) -> None:
    """Puts `state` into the parameters. Raises WeightError if one of them, or of the state, is left over."""
    left = chunk.load_state_dict(state, strict=False)
    problems = [f"{name} is missing" for name in left.missing_keys if BESIDE not in name]
    problems += [f"nothing takes {name}" for name in left.unexpected_keys if BESIDE not in name]
    if problems:
        raise WeightError("; ".join(problems))
