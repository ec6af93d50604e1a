"""Between Hugging Face directories and Megatron checkpoints: streamed, verified, all or nothing."""
