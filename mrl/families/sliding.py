"""Common base of families with sliding-window and full attention layers, as given by `layer_types`."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.families.arch import LayerArch
from mrl.families.decoder import MAX_POSITIONS, MAX_WIDTH, Decoder
from mrl.families.keys import Keys
from mrl.families.rope import BY_LAYER, FULL, ROPE_TYPES, SLIDING, Types, refuse_rope

WINDOW = 4096  # where config.json has none


class SlidingDecoder(Decoder):
    """rope_types: supported types of the tables of rotary angles, one table for each kind of layer."""

    rope_types: Types = ROPE_TYPES

    def layers(self, keys: Keys, count: int) -> tuple[LayerArch, ...]:
        width, window = keys.size(self.width_key, MAX_WIDTH), keys.size("sliding_window", MAX_POSITIONS, WINDOW)
        kinds = {FULL: LayerArch(width, rope=FULL), SLIDING: LayerArch(width, window=window, rope=SLIDING)}
        return tuple(kinds[kind] for kind in self._kinds(keys, count))

    def pattern(self, keys: Keys) -> int:
        """Returns the period of full attention layers, each the last of its period, if `layer_types` is missing."""
        raise NotImplementedError

    def check_rope(self, keys: Keys) -> None:
        refuse_rope(keys, by_layer=True, types=self.rope_types)

    def other_layers(self, keys: Keys) -> Iterator[str]:
        return iter(())

    def _kinds(self, keys: Keys, count: int) -> list[str]:
        kinds = keys["layer_types"]
        if kinds is None:
            pattern = self.pattern(keys)
            return [SLIDING if (i + 1) % pattern else FULL for i in range(count)]
        if not isinstance(kinds, list) or len(kinds) != count or any(kind not in BY_LAYER for kind in kinds):
            raise keys.wrong("layer_types", f"{FULL} or {SLIDING} for each of the {count} layers")
        return kinds
