"""Shapes of a diffusers directory's parts, from its configurations without weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from mrl.config.checks.diffusion import NETS, latent_shape, net_of, numbered, vae_of
from mrl.config.trainers.diffusion import DiffusionConfig
from mrl.diffusion.conditioning import ConditioningInputs
from mrl.diffusion.text import FLUX_TOKENS, SD3_TOKENS
from mrl.foreign import read_json

CLIP_TOKENS = 77


@dataclass(frozen=True)
class Shapes:
    """Shapes of a diffusers directory's parts. text_elements: weights of the text encoders"""

    name: str
    config: dict[str, Any]
    vae: dict[str, Any] | None
    latent: tuple[int, int, int]
    text_elements: int

    @classmethod
    def read(cls, cfg: DiffusionConfig) -> Shapes:
        """Reads the shapes. Raises ValueError for a directory that the configuration checks would reject."""
        path = Path(cfg.model.path)
        _, name, config = net_of(path)
        vae = vae_of(path)
        encoders = [path / folder for folder in numbered("text_encoder", NETS[name].encoders + NETS[name].optional)]
        text = sum(elements(_text_model(folder)) for folder in encoders if (folder / "config.json").is_file())
        return cls(name, config, vae, latent_shape(name, config, vae, cfg.model.image_size), text)

    def conditioning(self, n: int, dtype: torch.dtype) -> ConditioningInputs:
        """Returns the conditioning of n prompts without values, on the default device."""
        kind, config = NETS[self.name].told, self.config
        if kind == "labels":
            has_labels = self.name != "UNet2DModel" or config.get("num_class_embeds")
            return {"class_labels": torch.zeros(n, dtype=torch.int64)} if has_labels else {}
        tokens = {"clip": CLIP_TOKENS, "sd3": CLIP_TOKENS + SD3_TOKENS, "flux": FLUX_TOKENS}[kind]
        width = config["cross_attention_dim" if kind == "clip" else "joint_attention_dim"]
        conditioning = {"encoder_hidden_states": torch.empty(n, tokens, width, dtype=dtype)}
        if kind != "clip":
            conditioning["pooled_projections"] = torch.empty(n, config["pooled_projection_dim"], dtype=dtype)
        return conditioning


def elements(module: nn.Module) -> int:
    """Returns the number of a module's weights."""
    return sum(parameter.numel() for parameter in module.parameters())


def _text_model(folder: Path) -> nn.Module:
    config = read_json(folder / "config.json")
    [name] = config["architectures"]
    kind = getattr(transformers, name)
    with torch.device("meta"):
        return kind(kind.config_class.from_dict(config))
