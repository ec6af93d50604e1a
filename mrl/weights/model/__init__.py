"""Weights in and out of Megatron models: loading from a directory, export as a stream or to a directory."""
