"""LoRA adapters on the linear layers of a built and loaded model, whose own weights are frozen.

Layers stay unmodified: a forward hook adds the adapters' part to the output, whatever implements the layer (Megatron or
transformer-engine). All communication between ranks has `rank` numbers a token. If A or B is replicated over
tensor-parallel ranks that hold different tokens (sequence parallelism), its gradient is marked to be summed.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mrl import platform
from mrl.config.sections.models import TrainConfig
from mrl.families import ModelArch, UnsupportedModel
from mrl.families.adapters import ADAPTER_INFIX, LoRA, adapted_rows, layer_of, part_of
from mrl.families.rows import ParameterMapping
from mrl.families.table import VALUE_HEAD
from mrl.models.lora_layer import AdaptedLayer, Adapter, AdapterDropout, LayerSharding
from mrl.models.naming import global_name
from mrl.parallel import Mesh


class Adapters:
    """Adapters of a model's chunks on this rank.

    spec: their configuration; base: digest of the base weights, set by the caller

    Several of them may share a model. Its layers have one at a time as children, so that passes, exports and
    checkpoints see a model with these adapters alone; see `activate`.
    """

    def __init__(self, spec: LoRA, layers: dict[nn.Parameter, AdaptedLayer], beside: Adapters | None = None) -> None:
        """beside: other adapters of the same model."""
        self.spec, self._layers, self.base = spec, layers, ""
        self._attached: list[Adapters] = beside._attached if beside is not None else []  # shared by all of the model
        self._attached[:] = [self]
        self._rounding = torch.zeros(2, device=platform.device())  # of `merged`, since the last `metrics`

    def activate(self) -> None:
        """Attaches these adapters to the layers, in place of others of the same model."""
        if self._attached == [self]:
            return
        self.detach_all()
        for layer in self._layers.values():
            layer.attach()
        self._attached[:] = [self]

    def detach_all(self) -> None:
        """Detaches the active adapters of the model, these or others."""
        for active in self._attached:
            for layer in active._layers.values():
                layer.detach()
        self._attached.clear()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Disables the adapters, so that the model computes as its base model."""
        for layer in self._layers.values():
            layer.is_on = False
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.is_on = True

    @torch.no_grad()
    def merged(self, parameter: nn.Parameter) -> Tensor:
        """Returns a weight merged with its adapters, in its dtype and layout; a weight without adapters is returned as
        is.

        Computed in float32 and rounded once. Collective over tensor parallelism with DoRA.
        """
        layer = self._layers.get(parameter)
        if layer is None:
            return parameter.detach()
        weight, rounding = layer.merged()
        self._rounding += rounding
        return weight

    def metrics(self) -> dict[str, float]:
        """Returns sync/adapter_rounding: the relative length by which rounding changed the adapters' contribution.

        Covers all weights merged since the last call. Near 1, engines receive almost nothing of the adapters.
        Collective over the world.
        """
        dist.all_reduce(self._rounding)
        lost, added = self._rounding.tolist()
        self._rounding.zero_()
        return {"sync/adapter_rounding": math.sqrt(lost / added) if added else 0.0}


def attach(
    chunks: Sequence[nn.Module],
    arch: ModelArch,
    mesh: Mesh,
    train: TrainConfig,
    seed: int,
    beside: Adapters | None = None,
) -> Adapters:
    """Attaches the adapters that `train.lora` configures and freezes everything but them and a value head.

    The chunks must be loaded and not yet wrapped. Call inside `mesh.active()`. Initial values depend on the seed and
    the layer's name alone. Raises UnsupportedModel for layers that hold several experts' weights in one module.

    beside: adapters that the model has already; `Adapters.activate` switches between them
    """
    assert train.lora is not None
    if beside is not None:
        beside.detach_all()
    made: dict[nn.Parameter, AdaptedLayer] = {}
    rows = dict(adapted_rows(arch))
    for chunk in chunks:
        for local, parameter in list(chunk.named_parameters()):
            name = global_name(chunk, local)
            parameter.requires_grad_(name == VALUE_HEAD)
            if name in rows and any(train.lora.spec.adapts(layer_of(hf)) for hf in rows[name].hf):
                made[parameter] = _layer(chunk, local, name, rows[name], arch, mesh, train, seed)
        if train.recompute != "none" and beside is None:
            _keep_gradients_alive(chunk)
        if train.lora.dropout:
            _tell_batches(chunk)
    return Adapters(train.lora.spec, made, beside)


def _layer(
    chunk: nn.Module,
    local: str,
    name: str,
    row: ParameterMapping,
    arch: ModelArch,
    mesh: Mesh,
    train: TrainConfig,
    seed: int,
) -> AdaptedLayer:
    parameter, (owner_name, _, attribute) = chunk.get_parameter(local), local.rpartition(".")
    if attribute != "weight":
        raise UnsupportedModel(f"lora: {name} shares a module with other weights: set layers: local, or other targets")
    assert train.lora is not None
    owner, spec = chunk.get_submodule(owner_name), train.lora.spec
    tp, tp_rank = mesh.tensor_cut(row.expert)
    is_sequence = train.parallel.sequence and tp > 1 and not row.expert
    place = LayerSharding(
        by_rows=row.tp_dim == 0,
        tp=tp,
        group=mesh.expert_tp_group if row.expert else mesh.tp_group,
        is_sequence=is_sequence,
        groups=(row.groups or arch.num_kv_heads) // tp if row.kind == "qkv" else 1,
    )
    parts: dict[str, Adapter | None] = {}
    sizes: dict[str, int] = {}
    for hf, (out, columns) in zip(row.hf, row.shapes, strict=True):
        part, own = part_of(hf), f"{name.removesuffix('.weight')}{ADAPTER_INFIX}{part_of(hf)}"
        sizes[part] = out // tp if place.by_rows else out
        parts[part] = None
        if spec.adapts(layer_of(hf)):
            whole = _first_values(own, spec.rank, columns, train.lora.init, seed)
            mine = whole if place.by_rows else whole.chunk(tp, 1)[tp_rank]
            parts[part] = Adapter(mine, sizes[part], parameter)
    layer = AdaptedLayer(owner, parts, sizes, place, spec, _dropout(name, row, place, tp_rank, train.lora.dropout))
    layer.mark(is_expert=row.expert)
    layer.attach()
    owner.register_forward_hook(layer.add)
    return layer


def _dropout(
    name: str, row: ParameterMapping, place: LayerSharding, tp_rank: int, share: float
) -> AdapterDropout | None:
    if not share:
        return None
    columns = 0 if place.by_rows else tp_rank * row.shapes[0][1] // place.tp
    part = (tp_rank, place.tp) if place.by_rows and place.is_sequence else (0, 1)
    return AdapterDropout(share, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"), columns, part)


def _tell_batches(chunk: Any) -> None:
    """Passes the batch to the adapters before every pass of a layer, including recomputed ones."""

    def tell(module: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        for layer in module.modules():
            if isinstance(layer, AdaptedLayer):
                layer.batch = named["packed_seq_params"]

    for layer in chunk.decoder.layers:
        layer.register_forward_pre_hook(tell, with_kwargs=True)


def _first_values(name: str, rank: int, columns: int, init: str, seed: int) -> Tensor:
    """Initial A [rank, columns] float32, the same under every layout."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    stream = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if init == "gaussian":
        return torch.randn(rank, columns, generator=stream) / rank
    return (torch.rand(rank, columns, generator=stream) * 2 - 1) / math.sqrt(columns)


def _keep_gradients_alive(chunk: Any) -> None:
    """Makes the embedding's output require gradients.

    Megatron recomputes layers only in the backward pass of their input. A frozen embedding's output would have none,
    and every gradient behind it would silently be zero.
    """

    def asks(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    if chunk.pre_process:
        chunk.embedding.register_forward_hook(asks)
