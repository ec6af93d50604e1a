"""Rotary frequencies, taken from transformers' own functions, for packed tokens of any position."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.config.problems import shortened
from mrl.families import ModelArch, UnsupportedModel


def inverse_frequencies(hf_path: str, arch: ModelArch) -> Tensor:
    """[head_dim / 2] float32, equal to the buffer of transformers' rotary module.

    Raises UnsupportedModel for a config.json that transformers cannot read and for a type that scales attention;
    `load_arch` has refused those that change with the sequence length (yarn, longrope, dynamic, ...) and a partial
    rotation.
    """
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        config = AutoConfig.from_pretrained(hf_path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a library reads a foreign file, and raises whatever comes of it
        reason = shortened(" ".join(str(error).split()), most=300)
        raise UnsupportedModel(f"{hf_path}/config.json: transformers cannot read it: {reason}") from error
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
        return 1.0 / (parameters["rope_theta"] ** exponents)
    inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if attention_scaling != 1.0 or inv_freq.numel() * 2 != arch.head_dim:
        raise UnsupportedModel(
            f"{hf_path}/config.json: rope_type={kind} scales attention by {attention_scaling} and rotates "
            f"{inv_freq.numel() * 2} of {arch.head_dim} channels; supported: 1 and all"
        )
    return inv_freq.float()


class RotaryAngles:
    """Angles of every token. No module and no buffer: a model's cast to bfloat16 must not reach the frequencies."""

    def __init__(self, inv_freq: Tensor) -> None:
        self.inv_freq = inv_freq

    def __call__(self, position_ids: Tensor) -> Tensor:
        """position_ids [1, t] -> [t, 1, 1, head_dim] float32, both halves of the channels alike."""
        angles = self._angles(position_ids)
        return torch.cat([angles, angles], -1)[:, None, None]

    def cos_sin(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position_ids [1, t] -> [t, 1, head_dim / 2] each, taken in float32 and rounded to `dtype`."""
        angles = self._angles(position_ids)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _angles(self, position_ids: Tensor) -> Tensor:
        return position_ids[0, :, None].float() * self.inv_freq
