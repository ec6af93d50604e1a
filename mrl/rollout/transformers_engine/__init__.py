"""The fallback engine: transformers' generate behind `mrl.rollout.protocol`."""
