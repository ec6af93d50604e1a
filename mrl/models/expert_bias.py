"""Workaround for Megatron's handling of experts with biases."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mrl.models.mcore import RowParallelLinear, set_tensor_model_parallel_attributes


class BiasedExpertRow(RowParallelLinear):
    """Second product of an expert with biases.

    Megatron adds the bias to the result in place, which autograd rejects for a view; here the result is not a view.
    Megatron
    also marks the bias as sequence-parallel, and would sum its gradient over tensor-parallel ranks that hold other
    experts; and as a replica, which the gradient's norm skips on all ranks but one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias.sequence_parallel = False
        set_tensor_model_parallel_attributes(self.bias, True, 0, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[t, ffn] -> ([t, h], the bias [h])."""
        out, bias = super().forward(x)
        return out.clone(), bias
