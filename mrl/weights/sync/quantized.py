"""The actor's weights for an engine in fp8: the layers' matrices as e4m3 in blocks of 128 x 128, each with the inverse
of its scale beside it, under the names of the hub's quantized checkpoints (`weight_scale_inv`).

The engine is started with that format (mrl.inference.sglang.command); embedding, head, norms and routers stay
unquantized. Written from SGLang's sources; not yet tested with an engine on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mrl.config.fp8_shapes import ENGINE_BLOCK, is_engine_fp8
from mrl.families import ModelArch
from mrl.kernels.fp8 import quantized_blocks
from mrl.weights.meta import TensorMeta
from mrl.weights.sync.payload import WeightSource

SCALE = "_scale_inv"


class QuantizedSource:
    """`source`, whose layers' matrices [n, k] become e4m3 [n, k] and float32 [ceil(n / 128), ceil(k / 128)]."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    @property
    def arch(self) -> ModelArch:
        return self._source.arch

    def metas(self) -> Sequence[TensorMeta]:
        return [made for meta in self._source.metas() for made in _metas(meta)]

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._source.stream():
            if not is_engine_fp8(name, tensor.shape):
                yield name, tensor
                continue
            values, inverse = quantized_blocks(tensor, ENGINE_BLOCK)
            yield name, values
            yield name + SCALE, inverse


def _metas(meta: TensorMeta) -> Iterator[TensorMeta]:
    if not is_engine_fp8(meta.name, meta.shape):
        yield meta
        return
    yield replace(meta, dtype=torch.float8_e4m3fn)
    yield TensorMeta(
        meta.name + SCALE, tuple(-(-size // ENGINE_BLOCK) for size in meta.shape), torch.float32, meta.sender
    )
