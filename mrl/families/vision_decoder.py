"""Decoder with image inputs: a text family's layers behind a vision tower (`mrl.families.vision`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mrl.families.arch import ModelArch, VisionArch
from mrl.families.decoder import Decoder
from mrl.families.keys import Keys, UnsupportedModel, short
from mrl.families.rope import refuse_partial
from mrl.families.rows import BODY, MappingTable
from mrl.families.vision import TOWER, read_tower, rope_axes

IN_MEMORY = "model.language_model."  # transformers' prefix of the decoder in a loaded model
ROPE_KEYS = ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor")  # only in `text_config`, if any


class VisionDecoder(Decoder):
    """Vision-language family. config.json has the decoder's keys under `text_config`, or at the top level as in the
    hub's Qwen2.5-VL; the tower's keys under `vision_config`.

    tower: the hub's prefix of the tower's tensors; tower_width: vision_config's key of its width; tower_defaults: as
    `defaults`, of vision_config
    interleaved: text, row and column alternate over the rotary frequencies, whatever `mrope_interleaved` says
    """

    tower: str
    tower_width = "hidden_size"
    tower_defaults: Mapping[str, Any] = {}
    interleaved: bool

    def keys(self, config: dict[str, Any], where: str) -> Keys:
        vision = config.get("vision_config")
        if isinstance(vision, dict):
            config = {**config, "vision_config": {**self.tower_defaults, **vision}}
        return super().keys(config, where)

    def read(self, keys: Keys) -> ModelArch:
        arch = super().read(self._text(keys))
        vision = keys.table("vision_config")
        if vision is None:
            raise keys.wrong("vision_config", "an object")
        axes = rope_axes(self._text(keys), arch.head_dim, self.interleaved)
        found = read_tower(keys, vision, axes, self.tower_width, arch.hidden_size, arch.vocab_size)
        if len(found.deep) > arch.num_layers:
            raise vision.wrong("deepstack_visual_indexes", f"no more than the decoder's {arch.num_layers} layers")
        return replace(arch, vision=found)

    def refuse(self, keys: Keys) -> None:
        super().refuse(self._text(keys))

    def check_rope(self, keys: Keys) -> None:
        """Raises UnsupportedModel unless the frequencies are plain; `mrope` on the hub is `default` with sections."""
        refuse_partial(keys)
        for name in ("rope_parameters", "rope_scaling"):
            rope = keys.table(name)
            if rope is None:
                continue
            kinds = {rope["rope_type"], rope["type"]} - {None}
            if not kinds <= {"default", "mrope"}:
                raise UnsupportedModel(f"{keys.where}: {name}.rope_type={short(kinds)}; supported: default, mrope")
            refuse_partial(rope)

    def tower_rows(self, vision: VisionArch) -> MappingTable:
        """Returns the tower's parameters, under global names."""
        raise NotImplementedError

    def in_memory(self, name: str) -> str:
        if name.startswith(self.tower):
            return "model." + TOWER + name.removeprefix(self.tower)
        return IN_MEMORY + name.removeprefix(self.body) if name.startswith(self.body) else name

    def in_engine(self, name: str) -> str:
        if name.startswith(self.tower):
            return TOWER + name.removeprefix(self.tower).replace(".attn.qkv.", ".attn.qkv_proj.")
        return BODY + name.removeprefix(self.body) if name.startswith(self.body) else name

    def differences(self, keys: Keys) -> Iterator[str]:
        yield from super().differences(keys)
        for key in ("audio_config", "talker_config"):
            if keys[key] is not None:
                yield f"{key} (only images and text)"

    def _text(self, keys: Keys) -> Keys:
        """The decoder's keys alone, with the keys of the whole model."""
        text = keys.table("text_config")
        if text is None:
            return keys
        own = {name: value for name, value in text.content.items() if value is not None}
        beside = {name: value for name, value in keys.content.items() if name not in ROPE_KEYS}
        whole = {name: keys[name] for name in ("model_type", "tie_word_embeddings", "quantization_config", "auto_map")}
        return Keys({**beside, **own, **whole}, keys.where)
