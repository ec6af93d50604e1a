"""What Megatron gets wrong of experts with biases."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mrl.models.mcore import RowParallelLinear, set_tensor_model_parallel_attributes


class BiasedExpertRow(RowParallelLinear):
    """The second product of an expert with biases.

    Megatron adds the bias to the result in place, which autograd refuses of a view: here it is none. It marks the bias
    as one of ranks that share the tokens out, whose parts of its gradient it then adds up over tensor parallelism,
    whose ranks have other experts; and as a copy, which is left out of the gradient's norm on all ranks but one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias.sequence_parallel = False
        set_tensor_model_parallel_attributes(self.bias, True, 0, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[t, ffn] -> ([t, h], the bias [h])."""
        out, bias = super().forward(x)
        return out.clone(), bias
