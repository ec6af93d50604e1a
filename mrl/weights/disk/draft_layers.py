"""Multi-token prediction (MTP) layers of a model directory: draft layers behind the last layer, for speculative
decoding. mrl does not build or train them; exports and conversions copy their tensors.
"""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

from mrl.config.model_dirs import is_converted
from mrl.families import CONVERTED_DRAFTS, FAMILIES, ModelArch, has_draft_layers
from mrl.families.table import Role
from mrl.weights.disk.safetensors_io import HFCheckpoint
from mrl.weights.errors import WeightError
from mrl.weights.meta import COPIED, TensorMeta


def is_draft(arch: ModelArch, name: str) -> bool:
    """Returns True for a tensor of the family's MTP layers: with a prefix of their own, or behind the last layer."""
    family = FAMILIES[arch.family]
    if family.draft_body is not None:
        return name.startswith(family.draft_body)
    found = re.match(r"model\.layers\.(\d+)\.", name) if family.draft_keys else None
    return found is not None and int(found[1]) >= arch.num_layers


def open_drafts(model: Path, allow_pickle: bool = False) -> HFCheckpoint:
    """Opens the weights of a model directory, Hugging Face's or converted, that include its MTP layers."""
    return HFCheckpoint(model / CONVERTED_DRAFTS if is_converted(model) else model, allow_pickle)


def draft_metas(model: Path | None, arch: ModelArch, role: Role, allow_pickle: bool = False) -> list[TensorMeta]:
    """Returns the tensors of the MTP layers in `model`; reads headers only.

    None for a critic, which predicts no tokens, without a model, and if its config.json counts no such layers or its
    weights have none (transformers leaves them out when it saves a model).
    Raises WeightError if config.json counts MTP layers and the weights cannot be read.
    """
    if model is None or role == "critic" or not has_draft_layers(model):
        return []
    try:
        with closing(open_drafts(model, allow_pickle)) as checkpoint:
            found = [(name, checkpoint.source(name)) for name in checkpoint if is_draft(arch, name)]
            return [TensorMeta(name, source.shape, source.dtype, COPIED) for name, source in found]
    except (WeightError, OSError) as error:
        keys = " or ".join(FAMILIES[arch.family].draft_keys)
        counts = f"{model}/config.json counts multi-token prediction layers ({keys})"
        has = counts if keys else f"{model} has multi-token prediction layers"
        other = ", or set the key to 0 there to write the model without these layers" if keys else ""
        raise WeightError(f"{error}; {has}, which are copied from its weights: restore them{other}") from error


def draft_note(model: Path, export: Path) -> str:
    """Returns a sentence on the MTP layers of `export`, which was made from `model`; empty if `model` counts none."""
    if not has_draft_layers(model):
        return ""
    if has_draft_layers(export):
        return f"its multi-token prediction layers are copies of those in {model}: mrl does not train them"
    return (
        f"it is without the multi-token prediction layers that {model}/config.json counts: the weights there have "
        "none, or they do not belong to this model (random initial weights, a score head)"
    )
