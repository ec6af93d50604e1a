"""Torch Adam's state inside Megatron's distributed optimizer: to be there before a save, to be right after a load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def _torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Those among the parts that are torch's own Adam; transformer-engine's and apex' keep no step per parameter."""
    parts = optimizer.chained_optimizers if hasattr(optimizer, "chained_optimizers") else [optimizer]
    for part in parts:
        inner = part.optimizer
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            yield inner


def prime_adam(optimizer: Any) -> None:
    """Give every parameter the zero state that torch's Adam makes at its first step; a sharded state dict needs it."""
    for inner in _torch_optimizers(optimizer):
        for group in inner.param_groups:
            for p in group["params"]:
                if not inner.state[p]:
                    inner.state[p] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }


def unshare_steps(optimizer: Any) -> None:
    """Call after every load. Megatron puts ONE step tensor into all parameters' states; Adam adds 1 to it in place for
    each parameter, so its bias correction would silently be that of many times the steps."""
    for inner in _torch_optimizers(optimizer):
        for state in inner.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()
