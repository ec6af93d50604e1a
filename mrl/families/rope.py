"""What config.json may ask of rotary embeddings."""

from __future__ import annotations

from mrl import float32
from mrl.families.keys import Keys, UnsupportedModel, short

ROPE_TYPES = {  # with the numbers that each needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def refuse_rope(keys: Keys) -> None:
    """What `mrl.models.rope` cannot give, found before a process starts. Raises UnsupportedModel, naming the key."""
    _refuse_partial(keys)
    for name in ("rope_parameters", "rope_scaling"):
        rope = keys.table(name)
        if rope is None:
            continue
        kind = rope["rope_type"] or rope["type"] or "default"
        if not isinstance(kind, str) or kind not in ROPE_TYPES:
            raise UnsupportedModel(
                f"{keys.where}: {name}.rope_type={str(kind)[:60]}; supported: {', '.join(ROPE_TYPES)}"
            )
        _refuse_partial(rope)
        rope.number("original_max_position_embeddings", 1.0, float32.TINY, float32.MAX)
        for needed in ROPE_TYPES[kind]:
            rope.number(needed, None, float32.TINY, float32.MAX)


def _refuse_partial(keys: Keys) -> None:
    keys.number("rope_theta", 10000.0, 1.0, float32.MAX)
    if keys["partial_rotary_factor"] not in (None, 1):
        found = short(keys["partial_rotary_factor"])
        raise UnsupportedModel(f"{keys.where}: partial_rotary_factor={found}; supported: 1")
