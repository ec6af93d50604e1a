"""One file a family: the rows of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable

from mrl.models.arch import Family, ModelArch
from mrl.weights.families import llama, mixtral, qwen2, qwen3, qwen3_moe
from mrl.weights.kinds import Row

LAYER_ROWS: dict[Family, Callable[[ModelArch, int], dict[str, Row]]] = {
    "llama": llama.layer,
    "mistral": llama.layer,
    "qwen2": qwen2.layer,
    "qwen3": qwen3.layer,
    "mixtral": mixtral.layer,
    "qwen3_moe": qwen3_moe.layer,
}
