"""Weights in and out of the transformers engine: payloads, checkpoint names, checksums."""

from __future__ import annotations

import base64
import hashlib
import io
import pickle
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

VOCAB_PADDING = 64  # SGLang rounds its embedding rows up to this; the rows beyond the vocabulary are zero
_EXPERT = re.compile(
    r"(?P<layer>model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(?P<expert>\d+)\.(?P<part>\w+)\."
)
_GATE_UP = {"w1": 0, "gate_proj": 0, "w3": 1, "up_proj": 1}


def _tensor_from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


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
            return _tensor_from_bytes
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
    """[(HF name, tensor)] of one base64 pickle, in the two forms of `EngineClient.update_weights_from_tensor`."""
    value = TensorUnpickler(io.BytesIO(base64.b64decode(payload))).load()
    if load_format is None:
        return list(value)
    if load_format != "flattened_bucket":
        raise ValueError(f"unknown load_format {load_format}")
    flat = value["flattened_tensor"]
    return [(m.name, flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape)) for m in value["metadata"]]


def load_named(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> None:
    """Copy tensors under checkpoint names into the model. Raises KeyError for a name without a place and ValueError
    for a wrong shape."""
    places = dict(model.named_parameters())
    tied = bool(model.config.get_text_config().tie_word_embeddings)  # type: ignore[union-attr,operator]
    with torch.no_grad():
        for name, tensor in named:
            if tied and name == "lm_head.weight":
                continue
            target = _place(places, name)
            if target.shape != tensor.shape:
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, the model has {tuple(target.shape)}")
            target.copy_(tensor)


def _place(places: dict[str, nn.Parameter], name: str) -> Tensor:
    """The parameter, or the part of a fused expert parameter, that a checkpoint name stands for."""
    if name in places:
        return places[name]
    match = _EXPERT.match(name)
    if match is None:
        renamed = name.replace(".block_sparse_moe.", ".mlp.")
        if renamed in places:
            return places[renamed]
        raise KeyError(f"the model has no parameter {name}")
    prefix, expert, part = f"{match['layer']}.mlp.experts", int(match["expert"]), match["part"]
    if part in _GATE_UP:
        fused = places[f"{prefix}.gate_up_proj"][expert]
        return fused.chunk(2)[_GATE_UP[part]]
    return places[f"{prefix}.down_proj"][expert]


def tensor_checksum(tensor: Tensor) -> str:
    """16 hex digits, as SGLang's on CPU: the first 8 bytes of SHA-256 over the contiguous bytes, of any dtype."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.data).hexdigest()[:16]


def checksums(model: nn.Module) -> dict[str, str]:
    """The hash of every parameter under SGLang's names and in its fused layout (one tensor-parallel rank)."""
    return {name: tensor_checksum(tensor) for name, tensor in _engine_layout(model).items()}


def _engine_layout(model: nn.Module) -> dict[str, Tensor]:
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    mixtral = model.config.model_type == "mixtral"  # type: ignore[union-attr]
    out: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        if ".q_proj." in name:
            parts = [parameters[name.replace(".q_proj.", f".{part}.")] for part in ("q_proj", "k_proj", "v_proj")]
            out[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
        elif ".gate_proj." in name:
            out[name.replace(".gate_proj.", ".gate_up_proj.")] = torch.cat(
                [tensor, parameters[name.replace(".gate_proj.", ".up_proj.")]]
            )
        elif ".k_proj." in name or ".v_proj." in name or ".up_proj." in name:
            continue
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            out[name] = nn.functional.pad(tensor, (0, 0, 0, -tensor.shape[0] % VOCAB_PADDING))
        else:
            name = name.replace(".experts.gate_up_proj", ".experts.w13_weight")
            name = name.replace(".experts.down_proj", ".experts.w2_weight")
            out[name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name] = tensor
    return out
