"""Comparison of a Megatron checkpoint with a Hugging Face model: tensors bit for bit, then logits."""
