"""Vision towers of Qwen2.5-VL and Qwen3-VL: their shape, and their weights under the hub's names.

The tower itself is transformers' module (`mrl.models.vision`); its parameters keep their names and are never sharded.
"""

from __future__ import annotations

from mrl.families.arch import VisionArch
from mrl.families.keys import Keys, UnsupportedModel, short
from mrl.families.rope import rope_table
from mrl.families.rows import MappingTable, ParameterMapping

TOWER = "visual."  # before the names of the tower's parameters in the whole model
MAX_SIDE, MAX_WIDTH, MAX_DEPTH, MAX_TABLE = 1 << 10, 1 << 20, 4096, 1 << 20  # beyond these a number is a mistake


def rope_axes(keys: Keys, head_dim: int, interleaved: bool) -> tuple[int, ...]:
    """Returns VisionArch.axes from `mrope_section`: text, row and column in consecutive chunks, or alternating
    (`interleaved`).

    Raises UnsupportedModel, naming the key, also if `mrope_interleaved` disagrees, because engines follow it.
    """
    rope = rope_table(keys) or Keys({}, f"{keys.where}: rope_scaling")
    section = rope["mrope_section"]
    half = head_dim // 2
    if (
        not isinstance(section, list)
        or len(section) != 3
        or any(type(part) is not int or part < 1 for part in section)
        or sum(section) != half
    ):
        raise rope.wrong("mrope_section", f"three integers above 0 with the sum {half}, half a head's channels")
    if rope.flag("mrope_interleaved", False) != interleaved:
        raise rope.wrong("mrope_interleaved", str(interleaved).lower())
    if not interleaved:
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    axes = [0] * half
    for axis in (1, 2):
        if 3 * section[axis] > half + 2:
            raise rope.wrong("mrope_section", f"alternating rows and columns within {half} frequencies")
        for place in range(axis, 3 * section[axis], 3):
            axes[place] = axis
    return tuple(axes)


def read_tower(keys: Keys, vision: Keys, axes: tuple[int, ...], width_key: str, hidden: int, vocab: int) -> VisionArch:
    """Returns the VisionArch of config.json and its `vision_config`.

    width_key: vision_config's key of the tower's width; hidden, vocab: the decoder's. Raises UnsupportedModel, naming
    the key.
    """
    tokens = keys.token_ids("image_token_id", vocab)
    if len(tokens) != 1:
        raise keys.wrong("image_token_id", f"one token id from 0 to {vocab - 1}")
    out = vision.size("out_hidden_size", MAX_WIDTH)
    if out != hidden:
        raise UnsupportedModel(f"{vision.where}: out_hidden_size={out} must equal the decoder's hidden_size, {hidden}")
    channels = vision.size("in_channels" if vision["in_chans"] is None else "in_chans", 16, 3)
    if channels != 3:
        raise UnsupportedModel(f"{vision.where}: {channels} channels per pixel; supported: 3")
    depth, merge = vision.size("depth", MAX_DEPTH), vision.size("spatial_merge_size", 16)
    return VisionArch(
        image_token=tokens[0],
        axes=axes,
        depth=depth,
        width=vision.size(width_key, MAX_WIDTH),
        ffn_size=vision.size("intermediate_size", MAX_WIDTH),
        out_width=out,
        channels=channels,
        temporal=vision.size("temporal_patch_size", 16, 2),
        patch=vision.size("patch_size", MAX_SIDE),
        merge=merge,
        positions=0 if vision["num_position_embeddings"] is None else vision.size("num_position_embeddings", MAX_TABLE),
        deep=_deep(vision, depth),
    )


def _deep(vision: Keys, depth: int) -> tuple[int, ...]:
    found = vision["deepstack_visual_indexes"]
    if found is None:
        return ()
    if not isinstance(found, list) or any(type(i) is not int or not 0 <= i < depth for i in found):
        raise vision.wrong("deepstack_visual_indexes", f"a list of layers from 0 to {depth - 1}, not {short(found)}")
    if sorted(set(found)) != found:
        raise vision.wrong("deepstack_visual_indexes", "in ascending order, each once")
    return tuple(found)


class TowerMappings:
    """Collects a tower's rows, parameter by parameter, under the hub's prefix."""

    def __init__(self, prefix: str) -> None:
        self.table: MappingTable = {}
        self._prefix = prefix

    def add(self, name: str, *shape: int, ones: bool = False) -> None:
        start = "ones" if ones else "zeros" if len(shape) == 1 else "normal"
        self.table[TOWER + name] = ParameterMapping("copy", (self._prefix + name,), (shape,), start=start)  # type: ignore[arg-type]

    def linear(self, name: str, rows: int, columns: int) -> None:
        self.add(f"{name}.weight", rows, columns)
        self.add(f"{name}.bias", rows)

    def layer_norm(self, name: str, size: int) -> None:
        self.add(f"{name}.weight", size, ones=True)
        self.add(f"{name}.bias", size)


def qwen2_5_tower(arch: VisionArch, prefix: str) -> MappingTable:
    """Returns the rows of Qwen2.5-VL's tower, in the order of its module's parameters."""
    rows, h = TowerMappings(prefix), arch.width
    rows.add("patch_embed.proj.weight", h, arch.channels, arch.temporal, arch.patch, arch.patch)
    for i in range(arch.depth):
        block = f"blocks.{i}."
        rows.add(block + "norm1.weight", h, ones=True)
        rows.add(block + "norm2.weight", h, ones=True)
        rows.linear(block + "attn.qkv", 3 * h, h)
        rows.linear(block + "attn.proj", h, h)
        rows.linear(block + "mlp.gate_proj", arch.ffn_size, h)
        rows.linear(block + "mlp.up_proj", arch.ffn_size, h)
        rows.linear(block + "mlp.down_proj", h, arch.ffn_size)
    wide = h * arch.merge**2
    rows.add("merger.ln_q.weight", h, ones=True)
    rows.linear("merger.mlp.0", wide, wide)
    rows.linear("merger.mlp.2", arch.out_width, wide)
    return rows.table


def qwen3_tower(arch: VisionArch, prefix: str) -> MappingTable:
    """Returns the rows of Qwen3-VL's tower, in the order of its module's parameters."""
    rows, h = TowerMappings(prefix), arch.width
    rows.add("patch_embed.proj.weight", h, arch.channels, arch.temporal, arch.patch, arch.patch)
    rows.add("patch_embed.proj.bias", h)
    rows.add("pos_embed.weight", arch.positions, h)
    for i in range(arch.depth):
        block = f"blocks.{i}."
        rows.layer_norm(block + "norm1", h)
        rows.layer_norm(block + "norm2", h)
        rows.linear(block + "attn.qkv", 3 * h, h)
        rows.linear(block + "attn.proj", h, h)
        rows.linear(block + "mlp.linear_fc1", arch.ffn_size, h)
        rows.linear(block + "mlp.linear_fc2", h, arch.ffn_size)
    wide = h * arch.merge**2
    for merger, norm in (("merger", h), *((f"deepstack_merger_list.{i}", wide) for i in range(len(arch.deep)))):
        rows.layer_norm(f"{merger}.norm", norm)
        rows.linear(f"{merger}.linear_fc1", wide, wide)
        rows.linear(f"{merger}.linear_fc2", arch.out_width, wide)
    return rows.table
