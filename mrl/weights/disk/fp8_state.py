"""fp8 state that layers keep beside their parameters: an empty tensor without fp8; with fp8, transformer-engine's is a
pickle that its layers run when they load it, and mrl's own (mrl.models.precision) is plain numbers behind a marker.

Delayed scaling computes the next scales from this state, so it must not be lost. It is restored after a check here that
it contains only tensors, plain values and transformer-engine's own recipes.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from mrl.models.precision import STATE
from mrl.weights.errors import WeightError

RECIPES = "transformer_engine.common.recipe"


def restorable_state(stored: Any, name: str) -> Tensor | None:
    """Returns the tensor that a layer may restore from an object `[value]` as Megatron stores it; None if it holds no
    state.

    The result is uint8 [n]. Raises WeightError, with `name`, for bytes that hold anything else.
    """
    value = stored[0] if isinstance(stored, list) and len(stored) == 1 else None
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.numel() == 0:
        return None
    content = value.numpy().tobytes()
    if content.startswith(STATE):
        return value
    try:
        _State(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise WeightError(f"{name} is not the fp8 state of a layer: {error}") from error
    return value


class _State(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return super().find_class(module, name)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == RECIPES and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _storage(content: bytes) -> Any:
    """Replaces torch's function of the same name, which would run code from the bytes."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
