"""OLMo 3: OLMo 2 with sliding-window layers between full attention layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mrl import float32
from mrl.families.keys import Keys
from mrl.families.olmo2 import Olmo2
from mrl.families.rope import FULL, SLIDING, YARN
from mrl.families.sliding import SlidingDecoder

PATTERN, THETA = 4, 500000.0  # where config.json has none


class Olmo3(SlidingDecoder, Olmo2):
    name, architecture = "olmo3", "Olmo3ForCausalLM"
    local_only = "windows and rotary embeddings that differ by layer"
    rope_types = YARN

    def pattern(self, keys: Keys) -> int:
        return PATTERN

    def differences(self, keys: Keys) -> Iterator[str]:
        yield from super().differences(keys)
        full, sliding = (_table(keys, kind) for kind in (FULL, SLIDING))
        if _theta(full) != _theta(sliding):
            yield "different rope_theta by kind of layer (engines support one)"
        if (sliding["rope_type"] or "default") != "default":
            yield f"rope_parameters.{SLIDING}.rope_type={sliding['rope_type']} (only default)"

    def engine_config(self, keys: Keys) -> Mapping[str, Any]:
        """SGLang has a separate class for this config.json, which lacks angles by kind of layer."""
        full = _table(keys, FULL)
        plain = {"rope_type": "default", "rope_theta": _theta(full)}
        return {} if keys["rope_parameters"] is None else {"rope_parameters": plain | full.content}


def _table(keys: Keys, kind: str) -> Keys:
    """Rotary keys of one kind of layer, in transformers' form.

    transformers applies the hub's single `rope_theta` and its scaling to full attention layers only.
    """
    rope = keys.table("rope_parameters")
    own = rope.table(kind) if rope is not None else None
    return own or Keys({"rope_theta": keys["rope_theta"]} if kind == FULL else {}, keys.where)


def _theta(table: Keys) -> float:
    return table.number("rope_theta", THETA, 1.0, float32.MAX)
