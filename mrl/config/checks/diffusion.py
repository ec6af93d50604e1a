"""Checks of a diffusion model and its sampler from the JSON files of a diffusers directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mrl.foreign import read_json

SCHEDULERS = {  # by sampler.kind
    "ddim": ("DDIMScheduler", "DDPMScheduler", "PNDMScheduler"),
    "flow_sde": ("FlowMatchEulerDiscreteScheduler",),
}
VAE = "AutoencoderKL"
FOLDERS = ("transformer", "unet")  # folders of a diffusers directory that may contain the network


@dataclass(frozen=True)
class NetKind:
    """Properties of a class of networks.

    Attributes:
        told: conditioning besides the latent and the time: classes, or text by one or several text encoders
        encoders: number of text encoders that the directory must have
        optional: number of further text encoders that it may have
        fixed: the network supports one size of latents only
    """

    told: Literal["labels", "clip", "sd3", "flux"]
    encoders: int = 0
    optional: int = 0
    fixed: bool = False


FLUX = "FluxTransformer2DModel"
NETS = {
    "DiTTransformer2DModel": NetKind("labels", fixed=True),
    "UNet2DModel": NetKind("labels"),
    "UNet2DConditionModel": NetKind("clip", 1),
    "SD3Transformer2DModel": NetKind("sd3", 2, optional=1),
    FLUX: NetKind("flux", 2),
}
FLUX_LATENT = 128  # default size of a latent in diffusers
PREDICTIONS = ("epsilon", "v_prediction", "sample")


def scheduler_problem(kind: str, name: str, config: dict[str, Any]) -> str | None:
    """Returns why a scheduler of this class and configuration has no step of this sampler kind; None if it has one."""
    known = SCHEDULERS[kind]
    if name not in known:
        others = [other for other, names in SCHEDULERS.items() if name in names]
        hint = f": use sampler.kind {others[0]}" if others else f"; {kind} supports {', '.join(known)}"
        return f"a {name} has no {kind} step{hint}"
    if kind == "flow_sde":
        return "invert_sigmas: it steps from image to noise" if config.get("invert_sigmas", False) else None
    clips = name != "PNDMScheduler" and config.get("clip_sample", True)
    if clips or config.get("thresholding", False):
        return "clip_sample or thresholding: clamped pixels have no gradient; set both to false"
    said = config.get("prediction_type", "epsilon")
    return None if said in PREDICTIONS else f"prediction_type {said!r} is none of {', '.join(PREDICTIONS)}"


def has_random_step(kind: str, config: dict[str, Any], steps: int) -> bool:
    """True if a step of this sampler with this scheduler has a probability.

    DDIM's step at time 0 is deterministic. A single step is at time 0 unless the scheduler places it elsewhere.
    """
    spacing, offset = config.get("timestep_spacing", "leading"), config.get("steps_offset", 0)
    at_zero = spacing == "linspace" or (spacing == "leading" and offset == 0)
    return kind != "ddim" or steps > 1 or not at_zero


def component(folder: Path, file: str = "config.json") -> tuple[str, dict[str, Any]]:
    """Returns class and configuration of one part of a diffusers directory. Raises ValueError."""
    try:
        found = read_json(folder / file)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {folder / file}: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("_class_name"), str):
        raise ValueError(f"{folder / file} names no class")
    return found["_class_name"], found


def net_of(path: str | Path) -> tuple[Path, str, dict[str, Any]]:
    """Returns folder, class and configuration of the network to train. Raises ValueError for an unknown class."""
    files = [Path(path) / name / "config.json" for name in FOLDERS]
    folder = next((file.parent for file in files if file.is_file()), None)
    if folder is None:
        raise ValueError(f"{path} is not a diffusers directory: no {' or '.join(f'{n}/config.json' for n in FOLDERS)}")
    name, config = component(folder)
    if name not in NETS:
        raise ValueError(f"{folder} is a {name}; mrl trains {', '.join(NETS)}")
    return folder, name, config


def vae_of(path: str | Path) -> dict[str, Any] | None:
    """Returns the configuration of the VAE; None if the directory has none. Raises ValueError for another class."""
    folder = Path(path) / "vae"
    if not folder.is_dir():
        return None
    name, config = component(folder)
    if name != VAE:
        raise ValueError(f"{folder} is a {name}; mrl decodes by an {VAE}")
    return config


def numbered(name: str, count: int) -> list[str]:
    """Returns the folder names NAME, NAME_2, ... of a diffusers directory."""
    return [name if i == 1 else f"{name}_{i}" for i in range(1, count + 1)]


def net_problem(name: str, config: dict[str, Any], vae: dict[str, Any] | None) -> str | None:
    """Returns why a network with this configuration and VAE cannot be trained; None if it can."""
    if name == "UNet2DConditionModel" and config.get("addition_embed_type") is not None:
        return f"addition_embed_type {config['addition_embed_type']!r} (Stable Diffusion XL) is not supported"
    takes = config["in_channels"] // _places(name)
    drawn = min(takes, config.get("out_channels") or takes) if vae is None else vae["latent_channels"]
    if takes != drawn:
        return f"in_channels: its input has {takes} channels, a latent has {drawn} (inpainting, editing: not supported)"
    return None


def pixels_a_latent(vae: dict[str, Any] | None) -> int:
    """Returns the pixels of an image's side per element of the latent's side."""
    return 1 if vae is None else 2 ** (len(vae["block_out_channels"]) - 1)


def latent_shape(
    name: str, config: dict[str, Any], vae: dict[str, Any] | None, image_size: int | None
) -> tuple[int, int, int]:
    """Returns (channels, height, width) of a latent. Raises ValueError for an image size that the network does not
    support."""
    size: Any = config.get("sample_size") or FLUX_LATENT
    height, width = (size, size) if isinstance(size, int) else size
    if image_size is not None:
        scale, unit = pixels_a_latent(vae), _unit(name, config)
        if image_size % (scale * unit):
            raise ValueError(f"{image_size} pixels are not a multiple of {scale * unit}, which this {name} needs")
        if NETS[name].fixed and (height, width) != (image_size // scale,) * 2:
            raise ValueError(f"this {name} generates images of one size only: {height * scale}")
        height = width = image_size // scale
    return config["in_channels"] // _places(name), height, width


def _places(name: str) -> int:
    """Returns the number of latent positions that the network packs into one input position."""
    return 4 if name == FLUX else 1


def _unit(name: str, config: dict[str, Any]) -> int:
    """Returns the number that the sides of a latent must be multiples of."""
    if name.startswith("UNet"):
        return int(2 ** (len(config["block_out_channels"]) - 1))
    return 2 if name == FLUX else int(config.get("patch_size", 1))


def blank_label(name: str, config: dict[str, Any]) -> int | None:
    """Returns the class that means "no class", for guidance; None if the network has none."""
    if name == "DiTTransformer2DModel":
        return int(config.get("num_embeds_ada_norm", 1000))
    count = config.get("num_class_embeds")
    return int(count) - 1 if count else None
