"""The difference of two checkpoints, computed in one process with the readers of Megatron and torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def differences(
    a: Path, b: Path, vocab: int, measure: Callable[[torch.Tensor, torch.Tensor], float]
) -> dict[tuple[str, str], float]:
    """Returns (learner, kind of tensor or "counters") -> largest difference.

    For tensors the difference is what `measure` returns, for counters the absolute difference. Both checkpoints must
    hold the same names. Rows of vocabulary padding are left out.
    """
    worst: dict[tuple[str, str], float] = {}
    for learner in json.loads((a / "complete").read_text())["learners"]:
        x, y = stored(a / learner), stored(b / learner)
        assert x.keys() == y.keys(), sorted(x.keys() ^ y.keys())
        for key, one in x.items():
            two = y[key]
            if "word_embeddings" in key or "output_layer" in key:
                one, two = one[:vocab], two[:vocab]
            if isinstance(one, torch.Tensor):
                kind = key.split(".")[2] if key.startswith("optimizer.state.") else "weights"
                difference = measure(one, two)
            else:
                kind, difference = "counters", float(abs(one - two))
            of_numbers = math.inf if math.isnan(difference) else difference
            worst[learner, kind] = max(worst.get((learner, kind), 0.0), of_numbers)
    return worst


def stored(folder: Path) -> dict[str, Any]:
    """Returns one learner's whole tensors and counters by name."""
    reader = FileSystemReader(folder)
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return {**dist_checkpointing.load_common_state_dict(str(folder)), **tensors}
