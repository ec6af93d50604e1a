"""A digest of the weights of a Hugging Face directory: what adapters were trained beside, and nothing else, they fit.

It is of the tensors (names, types, shapes, bytes), whatever files they are in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from torch import Tensor

from mrl import platform
from mrl.parallel import rank, world_size
from mrl.weights.agreement import WeightAgreement
from mrl.weights.disk.safetensors_io import HFCheckpoint


def base_digest(path: str | Path, allow_pickle: bool = False) -> str:
    """64 hex digits. Each rank reads a part of the tensors. Collective; raises WeightError on every rank."""

    def of_mine() -> list[tuple[str, str]]:
        with closing(HFCheckpoint(path, allow_pickle)) as checkpoint:
            mine = sorted(checkpoint)[rank() :: world_size()]
            return [(name, tensor_digest(checkpoint.source(name)[:])) for name in mine]

    parts = WeightAgreement().each(f"reading the weights of {path}", of_mine)
    return joined(pair for part in parts for pair in part)


def tensor_digest(tensor: Tensor) -> str:
    """Of its type, shape and bytes."""
    whole = tensor.detach().cpu().contiguous()
    found = hashlib.sha256(f"{whole.dtype} {tuple(whole.shape)} ".encode())
    found.update(platform.host_bytes(whole))
    return found.hexdigest()


def joined(digests: Iterable[tuple[str, str]]) -> str:
    """Of a model, from its tensors' names and digests, in any order."""
    return hashlib.sha256("\n".join(f"{name} {digest}" for name, digest in sorted(digests)).encode()).hexdigest()
