"""Conversion between Hugging Face directories and Megatron checkpoints: streamed, verified, all or nothing."""

WORKERS = 4  # threads a process: one reads, one casts, one writes, one waits for the disk
