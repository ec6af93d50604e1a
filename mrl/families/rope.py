"""Checks of config.json's rotary embeddings."""

from __future__ import annotations

from mrl import float32
from mrl.families.keys import Keys, UnsupportedModel, short

Types = dict[str, tuple[str, ...]]
ROPE_TYPES: Types = {  # type -> its required numbers
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


YARN: Types = {"default": (), "yarn": ("factor", "original_max_position_embeddings")}
FULL, SLIDING = BY_LAYER = ("full_attention", "sliding_attention")  # kinds of layers, and of tables of angles


def rope_table(keys: Keys) -> Keys | None:
    """Returns the table of rotary keys that transformers uses: `rope_scaling`, or without it `rope_parameters`."""
    return keys.table("rope_scaling" if keys["rope_scaling"] else "rope_parameters")


def rotary_dim(keys: Keys, head_dim: int, default: float) -> int | None:
    """Returns config.json's number of rotated channels of a head; None for all of them."""
    rope = rope_table(keys)
    of = rope if rope is not None and rope["partial_rotary_factor"] is not None else keys
    found = int(head_dim * of.number("partial_rotary_factor", default, float32.TINY, 1.0))
    if found % 2 or not found:
        raise of.wrong("partial_rotary_factor", f"such that it rotates an even number of a head's {head_dim} channels")
    return None if found == head_dim else found


def refuse_rope(keys: Keys, *, partial: bool = False, by_layer: bool = False, types: Types = ROPE_TYPES) -> None:
    """Raises UnsupportedModel, naming the key, for rotary embeddings that `mrl.models.rope` does not support.

    partial: the family rotates a part of a head's channels; by_layer: its kinds of layers may have separate tables;
    types: the family's supported types
    """
    refuse = _refuse_theta if partial else refuse_partial
    refuse(keys)
    for name in ("rope_parameters", "rope_scaling"):
        rope = keys.table(name)
        if rope is None:
            continue
        own = [table for kind in BY_LAYER if (table := rope.table(kind)) is not None] if by_layer else []
        for table in own or [rope]:
            _refuse_table(table, types)
            refuse(table)


def _refuse_table(rope: Keys, types: Types) -> None:
    kind = rope["rope_type"] or rope["type"] or "default"
    if not isinstance(kind, str) or kind not in types:
        raise UnsupportedModel(f"{rope.where}.rope_type={str(kind)[:60]}; supported: {', '.join(types)}")
    rope.number("original_max_position_embeddings", 1.0, float32.TINY, float32.MAX)
    for needed in types[kind]:
        rope.number(needed, None, float32.TINY, float32.MAX)


def _refuse_theta(keys: Keys) -> None:
    keys.number("rope_theta", 10000.0, 1.0, float32.MAX)


def refuse_partial(keys: Keys) -> None:
    """Raises UnsupportedModel for a partial rotation of a head's channels, or an absurd base."""
    _refuse_theta(keys)
    if keys["partial_rotary_factor"] not in (None, 1):
        found = short(keys["partial_rotary_factor"])
        raise UnsupportedModel(f"{keys.where}: partial_rotary_factor={found}; supported: 1")
