"""The fallback engine: transformers' generate behind `mrl.inference.protocol`."""
