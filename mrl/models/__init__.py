"""Megatron models of Hugging Face architectures; `mrl.families` describes the architectures."""
