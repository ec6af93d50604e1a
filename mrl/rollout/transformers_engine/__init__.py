"""The fallback engine: transformers' generate behind the subset of SGLang's HTTP interface that mrl uses."""

KEY_VARIABLE = "MRL_ENGINE_KEY"  # in the server's environment: the key that every request must carry
