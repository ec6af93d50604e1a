"""Torch Adam's state inside Megatron's distributed optimizer: created before a save, repaired after a load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def _torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yields the torch Adam optimizers; those of transformer-engine and apex have no step per parameter."""
    parts = optimizer.chained_optimizers if hasattr(optimizer, "chained_optimizers") else [optimizer]
    for part in parts:
        inner = part.optimizer
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            yield inner


def prime_adam(optimizer: Any) -> None:
    """Gives every parameter the zero state of torch Adam's first step, which a sharded state dict needs."""
    for inner in _torch_optimizers(optimizer):
        for group in inner.param_groups:
            for p in group["params"]:
                if not inner.state[p]:
                    inner.state[p] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }


def separate_step_tensors(optimizer: Any) -> None:
    """Gives each parameter its own step tensor. Call it after every load.

    Megatron loads ONE step tensor into all parameters' states. Adam increments it in place for each parameter, so its
    bias correction would silently be that of many times the steps.
    """
    for inner in _torch_optimizers(optimizer):
        for state in inner.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()
