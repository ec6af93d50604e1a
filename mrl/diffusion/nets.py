"""Construction of diffusers' nets, and calls with the arguments of each class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from mrl import platform
from mrl.config.checks.diffusion import FLUX, net_of
from mrl.config.sections.diffusion import DiffusionModelConfig, DiffusionTrainConfig
from mrl.diffusion import adapters
from mrl.diffusion.conditioning import ConditioningInputs
from mrl.diffusion.sharding import is_sharded, shard, whole
from mrl.foreign import complete
from mrl.parallel import rank


def build(model: DiffusionModelConfig, train: DiffusionTrainConfig, *, frozen: bool = False) -> Any:
    """Returns the net on this rank's device, or this rank's shard of it. Collective.

    The net is always in evaluation mode, since dropout would make every ratio differ from 1. Raises ValueError and
    OSError for a directory without such a net.

    frozen: a reference, without training and adapters
    """
    folder, name, config = net_of(model.path)
    kind, dtype = getattr(diffusers, name), getattr(torch, model.dtype)
    if model.from_scratch:
        net = kind.from_config(config)
    else:
        net = complete(kind.from_pretrained(folder, low_cpu_mem_usage=False, output_loading_info=True), folder)
    prepared(net, model, train, frozen=frozen)
    if train.sharded:
        shard(net, dtype)
    return net.to(platform.device())


def prepared(net: Any, model: DiffusionModelConfig, train: DiffusionTrainConfig, *, frozen: bool = False) -> Any:
    """Returns the net with its adapters, its weights trained or frozen and in their dtypes, on any device."""
    net.float().eval()
    if frozen:
        net.requires_grad_(False)
    elif train.lora is not None:
        adapters.add(net, train.lora)
    for parameter in net.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, model.dtype))
    if train.recompute and not frozen:
        net.enable_gradient_checkpointing()
    return net


def call(name: str, net: Any, x: Tensor, times: Tensor, conditioning: ConditioningInputs, guidance: float) -> Tensor:
    """Returns the output [n, C, H, W] of a net of class `name` for latents x at times [n].

    guidance: for nets with distilled guidance
    """
    return CALLS.get(name, _plain)(net, x, times, conditioning, guidance)


def takes_guidance(net: Any) -> bool:
    """True if guidance is distilled: a number as input replaces a second call without the prompt."""
    return bool(net.config.get("guidance_embeds", False))


def _plain(net: Any, x: Tensor, times: Tensor, conditioning: ConditioningInputs, guidance: float) -> Tensor:
    said: Tensor = net(x, timestep=times, **conditioning).sample
    return said[:, : x.shape[1]]  # a net that also predicts variances returns them last


def _flux(net: Any, x: Tensor, times: Tensor, conditioning: ConditioningInputs, guidance: float) -> Tensor:
    """Calls Flux with 2 x 2 patches as tokens, and their positions."""
    n, channels, height, width = x.shape
    rows, columns = height // 2, width // 2
    tokens = x.view(n, channels, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5).reshape(n, rows * columns, channels * 4)
    places = torch.zeros(rows, columns, 3, device=x.device)
    places[..., 1] += torch.arange(rows, device=x.device)[:, None]
    places[..., 2] += torch.arange(columns, device=x.device)
    said = net(
        hidden_states=tokens,
        timestep=times / 1000,
        img_ids=places.view(-1, 3),
        txt_ids=torch.zeros(conditioning["encoder_hidden_states"].shape[1], 3, device=x.device),
        guidance=torch.full((n,), guidance, device=x.device) if takes_guidance(net) else None,
        **conditioning,
    ).sample
    squares = said.view(n, rows, columns, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return squares.reshape(n, channels, height, width)


CALLS: dict[str, Callable[[Any, Tensor, Tensor, ConditioningInputs, float], Tensor]] = {FLUX: _flux}


def weights(net: nn.Module) -> dict[str, Tensor]:
    """Returns all that `save` writes in this rank's host memory, by name; on rank 0 alone for a replicated net.

    Collective for a sharded net.
    """
    if rank() and not is_sharded(net):
        return {}
    return {name: whole(value) for name, value in net.state_dict().items()}


def save(name: str, net: Any, stored: dict[str, Tensor], target: Path) -> None:
    """Writes a diffusers folder: a net of this class and configuration with these weights."""
    with torch.device("meta"):
        copy = getattr(diffusers, name).from_config(net.config)
    copy.load_state_dict(stored, assign=True)
    copy.save_pretrained(target)
