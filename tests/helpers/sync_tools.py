"""An exporter over a plain state dict with any number of sender ranks, shared by the tests of weight sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from mrl.families import ModelArch, load_arch
from mrl.weights.meta import TensorMeta


class FileExporter:
    """Streams the weights of a Hugging Face directory. sender_of: returns the rank that sends a tensor"""

    def __init__(self, path: Path, rank: int = 0, sender_of: Callable[[str], int] = lambda name: 0) -> None:
        self.arch: ModelArch = load_arch(path)
        self.tensors = load_file(path / "model.safetensors")
        self.rank, self.sender_of = rank, sender_of
        self.gather: Callable[[], None] = lambda: None  # stands for the collective that gathers the shards

    def metas(self) -> list[TensorMeta]:
        return [TensorMeta(n, tuple(t.shape), t.dtype, self.sender_of(n)) for n, t in self.tensors.items()]

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            self.gather()
            if self.sender_of(name) == self.rank:
                yield name, tensor
