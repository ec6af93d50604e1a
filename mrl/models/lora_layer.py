"""LoRA adapters of one Megatron linear layer, which may join several of the hub's, under tensor parallelism.

column (its rows are cut)     A on every rank, B cut by rows:    u = x A^T, gathered over the sequence; B u
row (its columns are cut)     A cut by columns, B on every rank: u = x A^T, summed over the ranks;      B u
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mrl.families.adapters import ADAPTER_INFIX, LoRA
from mrl.kernels.layers import rms_norm
from mrl.models.batch import ModelBatch
from mrl.models.mcore import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from mrl.models.noise import dropout

CHILD = ADAPTER_INFIX.strip(".")  # name of the adapters as a child of their layer


@dataclass(frozen=True)
class LayerSharding:
    """Sharding of a layer over its tensor-parallel ranks.

    by_rows: rows are cut, else columns
    is_sequence: the ranks have different tokens outside of the layer
    groups: query groups on this rank, by which the parts' rows interleave; 1: the parts are concatenated
    """

    by_rows: bool
    tp: int
    group: Any
    is_sequence: bool
    groups: int

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Joins the parts' rows along `dim`, in the order of the layer's rows."""
        if len(parts) == 1:
            return parts[0]
        if self.groups == 1:
            return torch.cat(tuple(parts), dim)
        return torch.cat([part.unflatten(dim, (self.groups, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)

    def split(self, whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Splits a tensor with the layer's rows along dimension 0 into parts with these numbers of rows."""
        if self.groups == 1:
            return list(whole.split(tuple(sizes)))
        parts = whole.unflatten(0, (self.groups, -1)).split([size // self.groups for size in sizes], 1)
        return [part.flatten(0, 1) for part in parts]


@dataclass(frozen=True)
class AdapterDropout:
    """Dropout of the adapters' input in one layer.

    share: of zeros; stream: distinct for every layer; first: this rank's first column; part: (index, count) of the
    equal parts of the tokens
    """

    share: float
    stream: int
    first: int
    part: tuple[int, int]


class Adapter(nn.Module):
    """Adapter of one of the hub's linear layers: this rank's parts of A [rank, in], B [out, rank], and DoRA's
    magnitude [out].
    """

    magnitude: nn.Parameter | None

    def __init__(self, first: Tensor, rows: int, like: Tensor) -> None:
        """first: initial A; like: a tensor of the dtype and device to use."""
        super().__init__()
        self.A = nn.Parameter(first.contiguous().to(like.device, like.dtype))
        self.B = nn.Parameter(torch.zeros(rows, first.size(0), dtype=like.dtype, device=like.device))
        self.magnitude = None


class AdaptedLayer(nn.Module):
    """Adapters of one Megatron linear layer.

    parts: the hub's linear layers, by name, in the order of the layer's rows; None: no adapter
    batch: of the current pass, for `dropout`
    """

    batch: ModelBatch | None = None

    def __init__(
        self,
        linear: nn.Module,
        parts: Mapping[str, Adapter | None],
        sizes: Mapping[str, int],
        place: LayerSharding,
        spec: LoRA,
        dropout: AdapterDropout | None = None,
    ) -> None:
        super().__init__()
        self.is_on, self._dropout = True, dropout
        self._linear = [linear]  # not as a child: it is the parent
        self._names, self._sizes, self._place, self._spec = list(parts), list(sizes.values()), place, spec
        for name, adapter in parts.items():
            if adapter is not None:
                self.add_module(name, adapter)
        if spec.dora:
            self._squares = self._row_squares()
            for name, squares in zip(self._names, place.split(self._squares, self._sizes), strict=True):
                if parts[name] is not None:
                    self._adapter(name).magnitude = nn.Parameter(squares.sqrt().to(self._weight.dtype))

    def attach(self) -> None:
        """Makes these the layer's adapters."""
        self._linear[0].add_module(CHILD, self)

    def detach(self) -> None:
        """Leaves the layer without adapters."""
        del self._linear[0]._modules[CHILD]

    def mark(self, *, is_expert: bool) -> None:
        """Marks sharded parameters, experts' parameters, and gradients that are parts of a sum, for Megatron.

        No expert's adapter is replicated over tensor-parallel ranks: all of it counts for the gradients' norm.
        """
        by_rows, uncut = self._place.by_rows, 0 if is_expert else None
        for adapter in self._adapters:
            cuts = [(adapter.A, uncut if by_rows else 1), (adapter.B, 0 if by_rows else uncut)]
            if adapter.magnitude is not None:
                cuts.append((adapter.magnitude, 0 if by_rows else uncut))
            for parameter, dim in cuts:
                marks: dict[str, Any] = {"allreduce": vars(self._weight).get("allreduce", True) or not is_expert}
                if dim is not None:
                    marks |= {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": 1}
                else:
                    marks["sequence_parallel"] = self._place.is_sequence
                vars(parameter).update(marks)

    def add(self, linear: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        """Forward hook that adds the adapters' part to the layer's output [..., rows]."""
        if not self.is_on or linear._modules.get(CHILD) is not self:
            return None
        out, bias = output
        update = self._spec.scale * self._update(self._dropped(self._normed(inputs[0])))
        if not self._spec.dora:
            return out + update, bias
        added = _bias_in(linear, bias)
        plain = out if added is None else out - added
        scaled = (plain + update) * self._lengthening().to(out.dtype)
        return (scaled if added is None else scaled + added), bias

    def merged(self) -> tuple[Tensor, Tensor]:
        """Returns ([rows, columns] merged weight; [2] float32 squared lengths of the rounding error and of the added
        part).

        The weight is computed in float32 and rounded once to its dtype.
        """
        plain = weight = self._weight.detach().float()
        pieces = [
            weight.new_zeros(size, weight.size(1)) if adapter is None else adapter.B.float() @ adapter.A.float()
            for size, adapter in zip(self._sizes, self._parts, strict=True)
        ]
        weight = weight + self._spec.scale * self._place.join(pieces, 0)
        if self._spec.dora:
            weight = weight * self._lengthening()[:, None]
        rounded = weight.to(self._weight.dtype)
        return rounded, torch.stack([(rounded.float() - weight).square().sum(), (weight - plain).square().sum()])

    def forward(self) -> None:
        """Raises NotImplementedError: `add` is a hook of the layer."""
        raise NotImplementedError

    @property
    def _weight(self) -> Tensor:
        weight = self._linear[0].weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def _parts(self) -> list[Adapter | None]:
        return [self._modules.get(name) for name in self._names]  # type: ignore[misc]

    @property
    def _adapters(self) -> list[Adapter]:
        return [adapter for adapter in self._parts if adapter is not None]

    def _adapter(self, name: str) -> Adapter:
        adapter: Adapter = self.get_submodule(name)  # type: ignore[assignment]
        return adapter

    def _normed(self, x: Tensor) -> Tensor:
        """Input of the matrix product: transformer-engine's layers apply the preceding norm inside."""
        norm = self._linear[0]._parameters.get("layer_norm_weight")
        return x if norm is None else rms_norm(x, norm, float(self._linear[0].eps))  # type: ignore[arg-type]

    def _dropped(self, x: Tensor) -> Tensor:
        """Applies dropout in a training pass."""
        drop, batch = self._dropout, self.batch
        if drop is None or batch is None or not batch.extras.drops:
            return x
        return dropout(x, batch, drop.share, drop.stream, drop.part, drop.first)

    def _update(self, x: Tensor) -> Tensor:
        """B A x, in the order and shape of the layer's own output."""
        place, adapters = self._place, self._adapters
        low = F.linear(x, torch.cat([adapter.A for adapter in adapters]))
        if place.tp > 1 and place.by_rows:
            low = _entering(low, place)
        elif place.tp > 1:
            low = _leaving(low, place)
        each = iter(low.chunk(len(adapters), -1))
        outs = [
            low.new_zeros(*low.shape[:-1], size) if adapter is None else F.linear(next(each), adapter.B)
            for size, adapter in zip(self._sizes, self._parts, strict=True)
        ]
        return place.join(outs, low.dim() - 1)

    @torch.no_grad()
    def _row_squares(self) -> Tensor:
        """Squared lengths of the weight's rows over all columns, [rows] float32."""
        squares = torch.linalg.vector_norm(self._weight.detach(), dim=1, dtype=torch.float32).square()
        return self._over_columns(squares)

    def _lengthening(self) -> Tensor:
        """DoRA's factor for each row of W + scale B A, [rows] float32; 1 for rows without an adapter.

        It is the magnitude, which alone takes a gradient, over the row's current length:
        |w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b (A A^T) b, without a matrix of the weight's size.
        """
        factors = []
        with torch.no_grad():
            weight, scale = self._weight.detach(), self._spec.scale
            stacked = torch.cat([adapter.A for adapter in self._adapters])
            products = self._place.split(F.linear(stacked, weight).float().T.contiguous(), self._sizes)
            own = self._place.split(self._squares, self._sizes)
        at = 0
        for size, squares, product, adapter in zip(self._sizes, own, products, self._parts, strict=True):
            if adapter is None:
                factors.append(squares.new_ones(size))
                continue
            with torch.no_grad():
                a, b = adapter.A.float(), adapter.B.float()
                change = 2 * scale * (product[:, at : at + len(a)] * b).sum(1) + scale**2 * ((b @ (a @ a.T)) * b).sum(1)
                length = (squares + self._over_columns(change)).sqrt()
            at += len(a)
            assert adapter.magnitude is not None
            factors.append(adapter.magnitude.float() / length)
        return self._place.join(factors, 0)

    def _over_columns(self, part: Tensor) -> Tensor:
        """Sums over the ranks that share the columns."""
        if self._place.tp > 1 and not self._place.by_rows:
            dist.all_reduce(part, group=self._place.group)
        return part


def _entering(low: Tensor, place: LayerSharding) -> Tensor:
    """Gathers all ranks' tokens, or copies; the gradient is the sum over the ranks."""
    if place.is_sequence:
        return gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=place.group)
    return copy_to_tensor_model_parallel_region(low, group=place.group)


def _leaving(low: Tensor, place: LayerSharding) -> Tensor:
    """Sums the ranks' parts; under sequence parallelism each rank keeps its tokens."""
    if place.is_sequence:
        return reduce_scatter_to_sequence_parallel_region(low, group=place.group)
    return reduce_from_tensor_model_parallel_region(low, group=place.group)


def _bias_in(linear: nn.Module, returned: Tensor | None) -> Tensor | None:
    """Returns the bias that the layer has already added to its output; None without one, or if returned separately."""
    bias = linear._parameters.get("bias")
    return bias if returned is None and bias is not None and bias.numel() else None
