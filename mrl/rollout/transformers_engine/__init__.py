"""The fallback engine: transformers' generate behind the subset of SGLang's HTTP interface that mrl uses."""
