"""Rotary frequencies from transformers' own functions, for packed tokens at any position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl.config.problems import shortened
from mrl.families import FAMILIES, ModelArch, UnsupportedModel
from mrl.models.hub_config import hub_config


def inverse_frequencies(hf_path: str, arch: ModelArch) -> dict[str, tuple[Tensor, float]]:
    """Returns, for each table of rotary angles, the inverse frequencies and the factor of cosines and sines.

    The frequencies [rotary width / 2] float32 equal the buffer of transformers' rotary module. Raises UnsupportedModel
    for a config.json that transformers cannot read and for a type that scales attention; `load_arch` has refused those
    that change with the sequence length (yarn, longrope, dynamic, ...).
    """
    try:
        config = hub_config(hf_path).get_text_config()
    except Exception as error:  # transformers may raise anything for a foreign file
        reason = shortened(" ".join(str(error).split()), most=300)
        raise UnsupportedModel(f"{hf_path}/config.json: transformers cannot read it: {reason}") from error
    return {name: _frequencies(config, name, hf_path, arch) for name in arch.rope_tables}


def _frequencies(config: Any, table: str, hf_path: str, arch: ModelArch) -> tuple[Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters[table] if table else config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, arch.rotary_width, 2, dtype=torch.int64).float() / arch.rotary_width
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    of_table = {"layer_type": table} if table else {}
    inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **of_table)
    scales = attention_scaling != 1.0 and FAMILIES[arch.family].local_only is None
    if scales or inv_freq.numel() * 2 != arch.rotary_width:
        raise UnsupportedModel(
            f"{hf_path}/config.json: rope_type={kind} scales attention by {attention_scaling} and rotates "
            f"{inv_freq.numel() * 2} of {arch.head_dim} channels; supported: 1 and {arch.rotary_width}"
        )
    return inv_freq.float(), float(attention_scaling)


class RotaryAngles:
    """Rotary angles of every token. Neither module nor buffer: a cast of the model to bfloat16 must not reach the
    frequencies.

    axes [head_dim / 2]: the position axis of each frequency; None: one axis
    factor: of the cosines and sines
    """

    def __init__(self, inv_freq: Tensor, axes: Tensor | None = None, factor: float = 1.0) -> None:
        self.inv_freq, self.axes, self.factor = inv_freq, axes, factor

    def __call__(self, position_ids: Tensor) -> Tensor:
        """Returns the angles [t, 1, 1, rotary width] float32 with equal halves; position_ids [1, t], with axes [3,
        t].
        """
        angles = self._angles(position_ids)
        return torch.cat([angles, angles], -1)[:, None, None]

    def cos_sin(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines [t, 1, rotary width], computed in float32 and rounded to `dtype`; position_ids as
        above.

        Both halves are equal, except that the first half of the sines is negated.
        """
        angles = self._angles(position_ids)[:, None]
        cos, sin = ((each * self.factor).to(dtype) for each in (angles.cos(), angles.sin()))
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def _angles(self, position_ids: Tensor) -> Tensor:
        positions = position_ids[0, :, None] if self.axes is None else position_ids[self.axes].T
        return positions.float() * self.inv_freq
