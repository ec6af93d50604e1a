"""Is this Megatron checkpoint that Hugging Face model? Tensors bit for bit, then logits."""
