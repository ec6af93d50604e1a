"""Qwen2.5-VL: Qwen2 with a windowed-attention vision tower."""

from __future__ import annotations

from dataclasses import replace

from mrl.families.arch import ModelArch, VisionArch
from mrl.families.keys import Keys
from mrl.families.qwen2 import Qwen2
from mrl.families.rows import MappingTable
from mrl.families.vision import MAX_SIDE, qwen2_5_tower
from mrl.families.vision_decoder import VisionDecoder


class Qwen25VL(VisionDecoder, Qwen2):
    name, architecture = "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "num_key_value_heads": 8}
    engine_score_bias = False  # it serves no such class
    tower = "visual."
    interleaved = False

    def read(self, keys: Keys) -> ModelArch:
        arch, vision = super().read(keys), keys.table("vision_config")
        assert arch.vision is not None and vision is not None
        side = vision.size("window_size", MAX_SIDE, 112) // arch.vision.patch
        whole = vision["fullatt_block_indexes"]
        count = len(whole) if isinstance(whole, list) else 4
        return replace(arch, vision=replace(arch.vision, gated=True, window=side**2, whole_layers=count))

    def tower_rows(self, vision: VisionArch) -> MappingTable:
        return qwen2_5_tower(vision, self.tower)

    def in_engine(self, name: str) -> str:
        name = super().in_engine(name)
        if name.startswith("visual."):
            return name.replace(".mlp.gate_proj.", ".mlp.gate_up_proj.").replace(".mlp.up_proj.", ".mlp.gate_up_proj.")
        return name
