"""Megatron's own linear layers, whose products take operands rounded to fp8 as transformer-engine's layers round them.

Inputs are gathered over sequence parallelism before they are rounded: a tensor's scale is then that of all its tokens,
as transformer-engine makes it by a reduction, and blocks are the same. Of a matrix that tensor parallelism cuts, each
rank scales its part; blocks do not see that where parts are whole blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mrl import platform
from mrl.kernels.fp8 import Scales, fp8_linear
from mrl.models.mcore import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    parallel_state,
)
from mrl.models.precision import STATE, Emulation


class _Rounded(nn.Module):
    """What a layer does instead of Megatron's product, and what it keeps for that."""

    emulation: Emulation
    scales: Scales | None
    is_expert: bool

    def rounds(self, emulation: Emulation) -> None:
        self.emulation, self.scales = emulation, emulation.scales()
        if self.scales is not None:
            self.scales.to(platform.device())

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **unused: Any,
    ) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return fp8_linear(input, weight, bias, self.emulation.recipe, self.scales)

    def get_extra_state(self) -> Tensor | None:
        """uint8 [n] for the checkpoint; None without a memory."""
        if self.scales is None:
            return None
        content = self.scales.state().cpu().view(torch.uint8)
        return torch.cat([torch.frombuffer(bytearray(STATE), dtype=torch.uint8), content])

    def set_extra_state(self, state: Any) -> None:
        """Takes it back. A checkpoint of layers that do not remember has none: then it starts anew. Raises ValueError
        for that of other layers."""
        if self.scales is None or not isinstance(state, Tensor) or state.numel() == 0:
            return
        if state[: len(STATE)].cpu().numpy().tobytes() != STATE:
            raise ValueError("the checkpoint's fp8 state is transformer-engine's: it cannot go on emulated")
        self.scales.restore(state[len(STATE) :].cpu().clone().view(torch.float32))


class RoundedColumnParallel(_Rounded, ColumnParallelLinear):
    def __init__(self, *args: Any, emulation: Emulation, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rounds(emulation)


class RoundedRowParallel(_Rounded, RowParallelLinear):
    def __init__(self, *args: Any, emulation: Emulation, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rounds(emulation)


def end_of_update(chunks: Iterable[nn.Module], *, is_kept: bool) -> None:
    """Delayed scaling: what was seen since the last update becomes the newest of the past, over every rank that had a
    part of it; not `is_kept`: it is forgotten, the update having been skipped. Call it inside the mesh; collective.

    transformer-engine does so after every micro-batch. Once an update is what makes it the same under every layout.
    """
    layers = list(_remembering(chunks))
    if not is_kept:
        for _, scales in layers:
            scales.forget()
        return
    for is_expert in (False, True):
        chosen = [scales for expert, scales in layers if expert == is_expert]
        if not chosen:
            continue
        seen = torch.stack([scales.seen for scales in chosen])
        for group in _groups(is_expert):
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
        for scales, own in zip(chosen, seen, strict=True):
            scales.roll(own)


@contextlib.contextmanager
def without_memory(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """What passes see here moves no scale: they are of no update."""
    kept = [(scales, scales.seen.clone()) for _, scales in _remembering(chunks)]
    yield
    for scales, seen in kept:
        scales.seen = seen


def _remembering(chunks: Iterable[nn.Module]) -> Iterator[tuple[bool, Scales]]:
    for chunk in chunks:
        for layer in chunk.modules():
            if isinstance(layer, _Rounded) and layer.scales is not None:
                yield layer.is_expert, layer.scales


def _groups(is_expert: bool) -> list[Any]:
    """The ranks that hold a part of the same layer, or of the same expert, or see other tokens of it."""
    if not is_expert:
        return [parallel_state.get_amax_reduction_group(with_context_parallel=True)]
    return [parallel_state.get_expert_tensor_parallel_group(), parallel_state.get_expert_data_parallel_group()]
