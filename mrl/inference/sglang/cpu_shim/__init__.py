"""On the PYTHONPATH of SGLang's processes on CPU only. Of it mrl itself uses a hash, in the transformers engine."""
