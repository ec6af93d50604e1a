"""Digest of the weights of a Hugging Face directory: adapters fit only the weights that they were trained with.

The digest covers the tensors (names, dtypes, shapes, bytes), independent of the files that hold them.
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
    """Returns 64 hex digits. Each rank reads a part of the tensors. Collective; raises WeightError on every rank."""

    def of_mine() -> list[tuple[str, str]]:
        with closing(HFCheckpoint(path, allow_pickle)) as checkpoint:
            mine = sorted(checkpoint)[rank() :: world_size()]
            return [(name, tensor_digest(checkpoint.source(name)[:])) for name in mine]

    parts = WeightAgreement().each(f"reading the weights of {path}", of_mine)
    return joined(pair for part in parts for pair in part)


def tensor_digest(tensor: Tensor) -> str:
    """Returns the digest of the tensor's dtype, shape and bytes; any shape."""
    whole = tensor.detach().cpu().contiguous()
    found = hashlib.sha256(f"{whole.dtype} {tuple(whole.shape)} ".encode())
    found.update(platform.host_bytes(whole))
    return found.hexdigest()


def joined(digests: Iterable[tuple[str, str]]) -> str:
    """Returns the digest of a model from the names and digests of its tensors, in any order."""
    return hashlib.sha256("\n".join(f"{name} {digest}" for name, digest in sorted(digests)).encode()).hexdigest()
