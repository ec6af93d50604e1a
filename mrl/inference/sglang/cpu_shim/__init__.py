"""Shim on the PYTHONPATH of SGLang's processes on CPUs only. mrl itself uses its hash in the transformers engine."""
