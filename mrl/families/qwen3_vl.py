"""Qwen3-VL (dense): Qwen3 with deep features of the vision tower added after its first layers."""

from __future__ import annotations

from mrl.families.arch import VisionArch
from mrl.families.qwen3 import Qwen3
from mrl.families.rows import MappingTable
from mrl.families.vision import qwen3_tower
from mrl.families.vision_decoder import VisionDecoder


class Qwen3VL(VisionDecoder, Qwen3):
    name, architecture = "qwen3_vl", "Qwen3VLForConditionalGeneration"
    defaults = Qwen3.defaults | {"max_position_embeddings": 128000}
    tower_defaults = {"deepstack_visual_indexes": [8, 16, 24], "num_position_embeddings": 2304}
    engine_score_bias = False  # it serves no such class
    body, tower = "model.language_model.", "model.visual."
    interleaved = True

    def tower_rows(self, vision: VisionArch) -> MappingTable:
        return qwen3_tower(vision, self.tower)
