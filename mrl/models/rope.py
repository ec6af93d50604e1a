"""Rotary frequencies, taken from transformers' own functions, for packed tokens of any position."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.models.arch import ModelArch, UnsupportedModel

ROPE_TYPES = ("default", "linear", "llama3")


def inverse_frequencies(hf_path: str, arch: ModelArch) -> Tensor:
    """[head_dim / 2] float32, equal to the buffer of transformers' rotary module.

    Raises UnsupportedModel, naming the key, for types that scale attention or change with the sequence length (yarn,
    longrope, dynamic, ...) and for a partial rotation.
    """
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(hf_path)
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    where = f"{hf_path}/config.json"
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"{where}: rope_parameters.rope_type={kind}; supported: {', '.join(ROPE_TYPES)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{where}: partial_rotary_factor={parameters['partial_rotary_factor']}; supported: 1")
    if kind == "default":
        exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
        return 1.0 / (parameters["rope_theta"] ** exponents)
    inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if attention_scaling != 1.0 or inv_freq.numel() * 2 != arch.head_dim:
        raise UnsupportedModel(
            f"{where}: rope_type={kind} scales attention by {attention_scaling} and rotates {inv_freq.numel() * 2} of "
            f"{arch.head_dim} channels; supported: 1 and all"
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
