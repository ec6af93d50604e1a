"""Mistral: Llama with a window that slides over the sequence, supported where no sequence outgrows it."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.families.decoder import Decoder, short_window
from mrl.families.keys import Keys


class Mistral(Decoder):
    name, architecture = "mistral", "MistralForCausalLM"
    defaults = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
    ignores_attention_bias = True

    def differences(self, keys: Keys) -> Iterator[str]:
        yield from super().differences(keys)
        yield from short_window(keys)
