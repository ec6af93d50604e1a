"""Weights in and out of the transformers engine: payloads, checkpoint names, checksums."""

from __future__ import annotations

import base64
import hashlib
import io
import pickle
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mrl.families import FAMILIES, ModelArch
from mrl.families.engine_names import VOCAB_MULTIPLE, HubTensor, fused_parameters
from mrl.families.rows import ParameterMapping
from mrl.families.stacks import slice_of
from mrl.families.table import HF_OUTPUT, weight_table
from mrl.inference.delta import LOADER


class TensorUnpickler(pickle.Unpickler):
    """Rebuilds tensors (by value, or in shared memory) inside plain containers, and nothing else."""

    _TORCH = {
        "torch": {"Size", "Tensor", "device"},
        "torch._utils": {"_rebuild_tensor_v2"},
        "torch.storage": {"UntypedStorage", "TypedStorage"},
        "torch.multiprocessing.reductions": {"rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if (module, name) == ("types", "SimpleNamespace"):
            return SimpleNamespace
        if (module, name) == ("collections", "OrderedDict"):
            return super().find_class(module, name)
        if name in self._TORCH.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"refused to unpickle {module}.{name}: only tensors may travel")


def read_payload(payload: str, load_format: str | None) -> list[tuple[str, Tensor]]:
    """[(HF name, tensor)] of one base64 pickle, in the forms of `EngineClient.update_weights_from_tensor`."""
    value = TensorUnpickler(io.BytesIO(base64.b64decode(payload))).load()
    if load_format in (None, LOADER):
        return list(value)
    if load_format != "flattened_bucket":
        raise ValueError(f"unknown load_format {load_format}")
    flat = value["flattened_tensor"]
    return [(m.name, flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape)) for m in value["metadata"]]


class ModelWeights:
    """The memory of a transformers model under the names that checkpoints may have: its parameters, such buffers as
    the table has, and the experts in
    those where transformers joins them. Raises KeyError if the model lacks what its family has."""

    def __init__(self, model: nn.Module, arch: ModelArch) -> None:
        held = {name for row in weight_table(arch).values() for name in row.hf}
        self._arch, self._parameters = arch, dict[str, Tensor](model.named_parameters())
        self._parameters |= {name: buffer for name, buffer in model.named_buffers() if name in held}
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._find_places()

    def _find_places(self) -> None:
        self._places: dict[str, Tensor] = {name: parameter.data for name, parameter in self._parameters.items()}
        in_memory = FAMILIES[self._arch.family].in_memory
        for row in weight_table(self._arch).values():
            for i, name in enumerate(row.hf):
                if name not in self._places and in_memory(name) in self._places:
                    self._places[name] = self._places[in_memory(name)]
                elif name not in self._places:
                    self._places[name] = self._part(row, i)

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copies tensors under checkpoint names into the model. Raises KeyError for a name without a place and
        ValueError for a wrong shape."""
        for name, tensor in named:
            if self._arch.tied_embeddings and name == HF_OUTPUT:
                continue
            if name not in self._places:
                raise KeyError(f"the model has no parameter {name}")
            target = self._places[name]
            if target.shape != tensor.shape:
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, the model has {tuple(target.shape)}")
            target.copy_(tensor)

    def release(self) -> None:
        """Gives the memory of all parameters up; the model can do nothing until `resume`."""
        self._places.clear()
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)

    def resume(self) -> None:
        """Takes memory again, full of NaN: what is used before it is loaded shows."""
        for name, parameter in self._parameters.items():
            parameter.data = parameter.data.new_full(self._shapes[name], torch.nan)
        self._find_places()

    def checksums(self) -> dict[str, str]:
        """The hash of every parameter under SGLang's names and in its fused layout (one tensor-parallel rank)."""
        return {
            name: tensor_checksum(self._fused(sources))
            for name, sources in fused_parameters(self._arch).items()
            if not sources[0].row.copy_of
        }

    def _fused(self, sources: Sequence[HubTensor]) -> Tensor:
        parts = [(one, self._places[one.name]) for one in sources]
        tensor = torch.cat([x.mT if one.is_transposed else x.float() if one.is_wide else x for one, x in parts])
        if sources[0].row.kind == "vocab" and FAMILIES[self._arch.family].engine_cuts_vocab:
            return nn.functional.pad(tensor, (0, 0, 0, -tensor.shape[0] % VOCAB_MULTIPLE))
        return tensor

    def _part(self, row: ParameterMapping, i: int) -> Tensor:
        """The tensor number `i` of a row, in the other form that it may have."""
        if (whole := slice_of(row.hf[i])) is not None and whole[0] in self._places:
            return self._places[whole[0]][whole[1]]
        if not row.aliases:
            raise KeyError(f"the model has no parameter {row.hf[i]}")
        part = self._places[row.aliases[i].name][tuple(slice(*limits) for limits in row.aliases[i].ranges)]
        return part.squeeze(0) if part.dim() > len(row.shapes[i]) else part


def tensor_checksum(tensor: Tensor) -> str:
    """16 hex digits, as SGLang's on CPU: the first 8 bytes of SHA-256 over the contiguous bytes, of any dtype."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.data).hexdigest()[:16]
