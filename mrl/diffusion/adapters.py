"""Low-rank adapters in a diffusers net, by peft."""

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
    """Freezes the net and gives it adapters in float32, which add nothing yet: A is normal, B is 0. Raises ValueError
    for targets that name no linear layer, or something else."""
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
        layer.cast_input_dtype_enabled = False  # what the net computes in: autocast's business, without a copy
    for name, parameter in net.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)


def is_adapter(name: str) -> bool:
    """Whether a weight of this name is trained."""
    return name.endswith((A, B))


def _layers(net: nn.Module) -> list[LoraLayer]:
    return [module for module in net.modules() if isinstance(module, LoraLayer)]


@contextlib.contextmanager
def off(net: nn.Module) -> Iterator[None]:
    """The net computes as it was before `add`."""
    for layer in _layers(net):
        layer.set_scale(NAME, 0.0)
    try:
        yield
    finally:
        for layer in _layers(net):
            layer.set_scale(NAME, 1.0)


def merged(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The weights of the net without adapters that computes the same, in float32, by the names it had before `add`."""
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
    """The adapters as `load_lora_weights` of diffusers takes them: alpha is the rank, so the scale is in B."""
    return {
        f"{prefix}.{name.replace(f'.{NAME}.', '.')}": weight * (scale if name.endswith(B) else 1.0)
        for name, weight in weights.items()
        if is_adapter(name)
    }
