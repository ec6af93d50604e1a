"""Diffusers' nets: built for a run, and called, each kind in its own words."""

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
from mrl.diffusion.conditions import Told
from mrl.diffusion.sharding import is_sharded, shard, whole
from mrl.foreign import complete
from mrl.parallel import rank


def build(model: DiffusionModelConfig, train: DiffusionTrainConfig, *, frozen: bool = False) -> Any:
    """The net on this rank's device, or its part of it; always in evaluation mode: whatever is random in it would make
    every ratio differ from 1. Collective. Raises ValueError and OSError for a directory without such a net.

    frozen: a reference, which nothing trains and which has no adapters
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
    """The net with its adapters, its weights trained or frozen and in their dtypes, wherever it is."""
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


def call(name: str, net: Any, x: Tensor, times: Tensor, told: Told, guidance: float) -> Tensor:
    """[n, C, H, W]: what a net of class `name` says of latents x at times [n]. guidance: for nets that are told it."""
    return CALLS.get(name, _plain)(net, x, times, told, guidance)


def takes_guidance(net: Any) -> bool:
    """Whether its guidance is distilled: a number that it is told, in place of a second call without the prompt."""
    return bool(net.config.get("guidance_embeds", False))


def _plain(net: Any, x: Tensor, times: Tensor, told: Told, guidance: float) -> Tensor:
    said: Tensor = net(x, timestep=times, **told).sample
    return said[:, : x.shape[1]]  # a net that also says variances says them last


def _flux(net: Any, x: Tensor, times: Tensor, told: Told, guidance: float) -> Tensor:
    """Squares of 2 x 2 are its tokens; it is told where each stands."""
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
        txt_ids=torch.zeros(told["encoder_hidden_states"].shape[1], 3, device=x.device),
        guidance=torch.full((n,), guidance, device=x.device) if takes_guidance(net) else None,
        **told,
    ).sample
    squares = said.view(n, rows, columns, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return squares.reshape(n, channels, height, width)


CALLS: dict[str, Callable[[Any, Tensor, Tensor, Told, float], Tensor]] = {FLUX: _flux}


def weights(net: nn.Module) -> dict[str, Tensor]:
    """All that `save` writes, in this rank's host memory, by name; rank 0's alone where every rank has it. Collective
    where the net is shared."""
    if rank() and not is_sharded(net):
        return {}
    return {name: whole(value) for name, value in net.state_dict().items()}


def save(name: str, net: Any, stored: dict[str, Tensor], target: Path) -> None:
    """Writes a folder that diffusers reads: a net of this class and the same configuration with these weights."""
    with torch.device("meta"):
        copy = getattr(diffusers, name).from_config(net.config)
    copy.load_state_dict(stored, assign=True)
    copy.save_pretrained(target)
