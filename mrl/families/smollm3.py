"""SmolLM3: Llama with some layers without rotary embeddings."""

from __future__ import annotations

from mrl.families.arch import LayerArch, ModelArch
from mrl.families.decoder import MAX_LAYERS, MAX_WIDTH, Decoder
from mrl.families.keys import Keys

INTERVAL = 4  # default period; the last layer of each has no rotary angles


class SmolLM3(Decoder):
    name, architecture = "smollm3", "SmolLM3ForCausalLM"
    defaults = {"max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True}
    local_only = "layers without rotary embeddings"

    def layers(self, keys: Keys, count: int) -> tuple[LayerArch, ...]:
        width, turned = keys.size(self.width_key, MAX_WIDTH), keys["no_rope_layers"]
        if turned is None:
            interval = keys.size("no_rope_layer_interval", MAX_LAYERS, INTERVAL)
            turned = [int((index + 1) % interval != 0) for index in range(count)]
        if not isinstance(turned, list) or len(turned) < count or any(each not in (0, 1) for each in turned):
            raise keys.wrong("no_rope_layers", f"1 (rotary embeddings) or 0 (none) for each of the {count} layers")
        return tuple(LayerArch(width, rope="" if each else None) for each in turned[:count])

    def engine_lacks(self, arch: ModelArch, tensor: int, *, quantized: bool) -> str | None:
        """SGLang has no native module of the family, and serves it with transformers' modules."""
        if tensor > 1:
            return f"runs {self.name} on one rank only: set rollout.tensor: 1"
        return f"runs {self.name} by transformers' modules, not in fp8: leave quantization out" if quantized else None
