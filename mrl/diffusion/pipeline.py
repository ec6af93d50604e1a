"""Parts of a diffusers directory: the trained net, and the frozen scheduler, prompt encoders and decoder."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from mrl import platform
from mrl.config.checks.diffusion import FLUX, SCHEDULERS, component, latent_shape, net_of
from mrl.config.sections.diffusion import DiffusionLoRAConfig, DiffusionModelConfig, DiffusionTrainConfig
from mrl.diffusion import adapters, nets
from mrl.diffusion.conditioning import Conditioning, ConditioningInputs, concatenate, conditioning_of
from mrl.foreign import complete
from mrl.parallel import rank
from mrl.weights.disk.digest import file_digests, weight_files, whole_digest

SCHEDULER = "scheduler_config.json"
ADAPTER = "pytorch_lora_weights.safetensors"  # diffusers' name


@dataclass
class Pipeline:
    """Parts of a diffusers directory.

    folder, name: of the net, and its class
    vae: None if the net works on pixels
    shape: (channels, height, width) of a latent
    lora: the net's adapters; None: the whole net is trained
    timing: arguments of the scheduler besides the number of steps
    """

    path: Path
    folder: str
    name: str
    net: Any
    scheduler: Any
    conditioning: Conditioning
    vae: Any
    shape: tuple[int, int, int]
    dtype: torch.dtype
    lora: DiffusionLoRAConfig | None
    timing: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(
        cls, cfg: DiffusionModelConfig, train: DiffusionTrainConfig | None = None, negative_prompt: str = ""
    ) -> Pipeline:
        """Loads the directory; with `from_scratch` the net's weights are random. Collective.

        Raises ValueError or OSError for a directory that the configuration checks would reject.
        """
        path, train, dtype = Path(cfg.path), train or DiffusionTrainConfig(), getattr(torch, cfg.dtype)
        folder, name, config = net_of(path)
        scheduler = _scheduler(path)
        vae = _vae(path)
        shape = latent_shape(name, config, dict(vae.config) if vae is not None else None, cfg.image_size)
        conditioning = conditioning_of(path, name, config, negative_prompt, dtype)
        net = nets.build(cfg, train)
        timing = _timing(scheduler, name, config, shape)
        return cls(path, folder.name, name, net, scheduler, conditioning, vae, shape, dtype, train.lora, timing)

    def timing_of(self, steps: int) -> dict[str, Any]:
        """Returns the arguments of `set_timesteps` besides the number of steps, as in diffusers' pipelines."""
        even = {"sigmas": np.linspace(1.0, 1 / steps, steps)} if self.name == FLUX else {}
        return {**self.timing, **even}

    def predict(
        self, x: Tensor, times: Tensor, conditioning: ConditioningInputs, guidance: float, net: Any = None
    ) -> Tensor:
        """Returns the net's output [n, C, H, W] float32 for latents x at times [n], with classifier-free guidance.

        guidance: scale (arXiv 2207.12598; 1: none), in one call of twice the batch
        net: another net of the same kind, in place of the trained one
        """
        net = self.net if net is None else net
        if guidance == 1 or nets.takes_guidance(net):
            return self._call(net, x, times, conditioning, guidance)
        both = concatenate(self.conditioning.blank(len(x)), conditioning)
        without, with_it = self._call(net, torch.cat([x, x]), torch.cat([times, times]), both, guidance).chunk(2)
        return without + guidance * (with_it - without)

    def _call(self, net: Any, x: Tensor, times: Tensor, conditioning: ConditioningInputs, guidance: float) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return nets.call(self.name, net, x, times, conditioning, guidance).float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Returns images [n, 3 or 1, H, W] in 0..1, rounded to 256 levels, as rewards and files receive them.

        Computes in float32, whatever the net's dtype.
        """
        if self.vae is not None:
            latents = self.vae.decode(latents.float() / self.vae.config.scaling_factor + _shift(self.vae)).sample
        return ((latents.float() / 2 + 0.5).clamp(0, 1) * 255).round() / 255

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Returns the latents [n, C, h, w] of images [n, 3 or 1, H, W] in 0..1; the mode of the encoder's
        distribution."""
        x = images.to(platform.device()) * 2 - 1
        if self.vae is None:
            return x
        return (self.vae.encode(x).latent_dist.mode() - _shift(self.vae)) * self.vae.config.scaling_factor

    @property
    def scale(self) -> float:
        """Scale of the adapters' contribution."""
        return self.lora.alpha / self.lora.rank if self.lora is not None else 1.0

    def base_digest(self) -> str:
        """Digest of the adapters' base weight files; empty without adapters, and on other ranks than 0."""
        if self.lora is None or rank():
            return ""
        return whole_digest(file_digests(weight_files(self.path / self.folder)))

    def save(self, weights: Mapping[str, Tensor], target: Path) -> None:
        """Writes a diffusers directory: the net from its `nets.weights`, all other parts unchanged. Adapters are
        merged."""
        shutil.copytree(self.path, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(self.folder, ".*"))
        stored = adapters.merged(weights, self.scale) if self.lora is not None else dict(weights)
        nets.save(self.name, self.net, stored, target / self.folder)

    def save_adapter(self, weights: Mapping[str, Tensor], target: Path) -> None:
        """Writes a folder for `load_lora_weights` of diffusers' pipelines."""
        stored = adapters.alone(weights, self.scale, self.folder)
        save_file({name: value.contiguous() for name, value in stored.items()}, target / ADAPTER)


def _scheduler(path: Path) -> Any:
    """Scheduler of the directory; one with alphas is replaced by DDIM."""
    name, _ = component(path / "scheduler", SCHEDULER)
    found = getattr(diffusers, name).from_pretrained(path / "scheduler")
    is_flow = name in SCHEDULERS["flow_sde"]
    return found if is_flow else diffusers.DDIMScheduler.from_config(found.config)


def _vae(path: Path) -> Any:
    folder = path / "vae"
    if not folder.is_dir():
        return None
    read = diffusers.AutoencoderKL.from_pretrained(folder, low_cpu_mem_usage=False, output_loading_info=True)
    vae = complete(read, folder)
    vae.enable_slicing()  # one image at a time: activations are large
    return vae.float().to(platform.device()).eval().requires_grad_(False)


def _shift(vae: Any) -> float:
    return vae.config.get("shift_factor") or 0.0


def _timing(scheduler: Any, name: str, config: dict[str, Any], shape: tuple[int, int, int]) -> dict[str, Any]:
    """Dynamic shifting, linear in the number of an image's tokens (diffusers' `calculate_shift`)."""
    cfg = scheduler.config
    if not cfg.get("use_dynamic_shifting", False):
        return {}
    patch = 2 if name == FLUX else config["patch_size"]
    tokens = math.prod(shape[1:]) // patch**2
    few, many = cfg.get("base_image_seq_len", 256), cfg.get("max_image_seq_len", 4096)
    low, high = cfg.get("base_shift", 0.5), cfg.get("max_shift", 1.15)
    return {"mu": low + (high - low) * (tokens - few) / (many - few)}
