"""Megatron's own linear layers with operands rounded to fp8 as in transformer-engine's layers.

Inputs are gathered over sequence parallelism before they are rounded: a tensor's scale then covers all its tokens,
as transformer-engine achieves by a reduction, and blocks are the same. Each tensor-parallel rank scales its own part of
a matrix; block scaling is unaffected where parts are whole blocks.
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
from mrl.models.precision import STATE, FP8Emulation


class _Rounded(nn.Module):
    """Mixin that replaces Megatron's product with an fp8 one and keeps its scales."""

    emulation: FP8Emulation
    scales: Scales | None
    is_expert: bool

    def rounds(self, emulation: FP8Emulation) -> None:
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
        """State for the checkpoint, uint8 [n]; None without delayed scaling."""
        if self.scales is None:
            return None
        content = self.scales.state().cpu().view(torch.uint8)
        return torch.cat([torch.frombuffer(bytearray(STATE), dtype=torch.uint8), content])

    def set_extra_state(self, state: Any) -> None:
        """Restores the state.

        A checkpoint without one leaves the scales fresh. Raises ValueError for another implementation's state.
        """
        if self.scales is None or not isinstance(state, Tensor) or state.numel() == 0:
            return
        if state[: len(STATE)].cpu().numpy().tobytes() != STATE:
            raise ValueError("the checkpoint has transformer-engine's fp8 state: set precision.fp8.emulate: false")
        self.scales.restore(state[len(STATE) :].cpu().clone().view(torch.float32))


class RoundedColumnParallel(_Rounded, ColumnParallelLinear):
    def __init__(self, *args: Any, emulation: FP8Emulation, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rounds(emulation)


class RoundedRowParallel(_Rounded, RowParallelLinear):
    def __init__(self, *args: Any, emulation: FP8Emulation, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rounds(emulation)


def end_of_update(chunks: Iterable[nn.Module], *, is_kept: bool) -> None:
    """Delayed scaling: appends the amax seen since the last update to the history, reduced over the ranks that share
    the layer.

    If not `is_kept` (a skipped update), the amax is discarded. Call it inside the mesh; collective.

    transformer-engine does so after every micro-batch. Doing it once an update makes it the same under every layout.
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
def without_amax_history(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Keeps the passes inside from changing any scale, as they belong to no update."""
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
    """Ranks that hold a part of the same layer or expert, or see other tokens of it."""
    if not is_expert:
        return [parallel_state.get_amax_reduction_group(with_context_parallel=True)]
    return [parallel_state.get_expert_tensor_parallel_group(), parallel_state.get_expert_data_parallel_group()]
