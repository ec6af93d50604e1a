"""Megatron models of Hugging Face architectures. What such an architecture is stands in `mrl.families`."""
