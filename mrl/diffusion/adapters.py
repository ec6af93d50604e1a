"""Low-rank adapters (LoRA) of a diffusers net, by peft."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import peft
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from mrl.config.sections.diffusion import DiffusionLoRAConfig

NAME = "default"  # peft's
A, B, BASE = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight", ".base_layer"


def add(net: nn.Module, cfg: DiffusionLoRAConfig) -> None:
    """Freezes the net and adds float32 adapters that start as zero: A is normal, B is 0.

    Raises ValueError for targets that match no layer, or a layer that is not linear.
    """
    for target in cfg.targets:
        found = [module for name, module in net.named_modules() if name == target or name.endswith(f".{target}")]
        if not found:
            raise ValueError(f"actor.lora.targets: {type(net).__name__} has no layer {target!r}")
        if not all(isinstance(module, nn.Linear) for module in found):
            raise ValueError(f"actor.lora.targets: {target!r} is a {type(found[0]).__name__}, not linear")
    net.requires_grad_(False)
    lora = peft.LoraConfig(
        r=cfg.rank, lora_alpha=cfg.alpha, target_modules=list(cfg.targets), init_lora_weights="gaussian"
    )
    peft.inject_adapter_in_model(lora, net, NAME)
    for layer in _layers(net):
        layer.cast_input_dtype_enabled = False  # autocast sets the dtype without a copy
    for name, parameter in net.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)


def is_adapter(name: str) -> bool:
    """True if a weight of this name belongs to an adapter."""
    return name.endswith((A, B))


def _layers(net: nn.Module) -> list[LoraLayer]:
    return [module for module in net.modules() if isinstance(module, LoraLayer)]


@contextlib.contextmanager
def off(net: nn.Module) -> Iterator[None]:
    """Turns the adapters off: the net computes as before `add`."""
    for layer in _layers(net):
        layer.set_scale(NAME, 0.0)
    try:
        yield
    finally:
        for layer in _layers(net):
            layer.set_scale(NAME, 1.0)


def merged(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Returns the float32 weights of the equivalent net without adapters, by their names before `add`."""
    found = {}
    for name, weight in weights.items():
        if is_adapter(name):
            continue
        layer = name.removesuffix(f"{BASE}.weight")
        if layer + A in weights:
            weight = weight.float() + scale * weights[layer + B] @ weights[layer + A]
        found[name.replace(f"{BASE}.", ".")] = weight.float() if weight.is_floating_point() else weight
    return found


def alone(weights: Mapping[str, Tensor], scale: float, prefix: str) -> dict[str, Tensor]:
    """Returns the adapters for diffusers' `load_lora_weights`; alpha is the rank, so B contains the scale."""
    return {
        f"{prefix}.{name.replace(f'.{NAME}.', '.')}": weight * (scale if name.endswith(B) else 1.0)
        for name, weight in weights.items()
        if is_adapter(name)
    }
