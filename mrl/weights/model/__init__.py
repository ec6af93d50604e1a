"""Into Megatron models and out of them: loading from a directory, exporting as a stream or to one."""
