"""Llama: the plain decoder."""

from __future__ import annotations

from mrl.families.decoder import Decoder


class Llama(Decoder):
    name, architecture = "llama", "LlamaForCausalLM"
